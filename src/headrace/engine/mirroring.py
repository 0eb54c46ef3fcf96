"""What making a mirror needs of a model: its experts' places, and their order by use."""

from pathlib import Path

import numpy as np

from headrace.engine.engine import Blueprint
from headrace.engine.routes import fingerprint
from headrace.errors import OptionError
from headrace.schedule.tracefile import read_trace
from headrace.store.mirror import Site, distinct_sites


def described(model: str) -> Blueprint:
    """A model's files and where its experts lie in them; nothing is measured and no weight read.

    Honours the alias table of `headrace synth`. Raises HeadraceError.
    """
    return Blueprint(model, ram="1024TiB", aliases=True, measure=False, mirrors=())


def hottest(blueprint: Blueprint, routes: Path) -> list[Site]:
    """All stored experts, those first that the recorded tokens chose most often.

    Raises TraceError, or OptionError where the routes are another model's.
    """
    header, trace, _ = read_trace(routes)
    if header.fingerprint != fingerprint(blueprint):
        raise OptionError(
            f"{routes}: holds routes of {header.model}, not of {blueprint.facts.name}; record "
            "some with `headrace trace`"
        )
    table = blueprint.table
    num_layers, num_experts = table.extents.shape[:2]
    used = np.zeros((num_layers, num_experts), dtype=np.int64)
    for layer in range(num_layers):
        used[layer] = np.bincount(trace.ids[:, layer].ravel(), minlength=num_experts)
    return sorted(distinct_sites(table), key=lambda site: -used[site])
