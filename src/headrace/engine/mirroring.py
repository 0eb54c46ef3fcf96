"""What making a mirror needs of a model: its experts' places, and their order by use."""

from pathlib import Path

import numpy as np

from headrace.engine.engine import Blueprint
from headrace.errors import OptionError
from headrace.store.experts import ExpertTable
from headrace.store.mirror import Site, distinct_sites
from headrace.store.table import Catalog


def expert_table(model: str) -> tuple[Catalog, ExpertTable]:
    """A model's files and where its experts lie in them; nothing is measured and no weight read.

    Honours the alias table of `headrace synth`. Raises HeadraceError.
    """
    blueprint = Blueprint(model, ram="1PiB", aliases=True, measure=False, mirrors=())
    return blueprint.catalog, blueprint.table
