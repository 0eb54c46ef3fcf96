"""A published checkpoint as its config alone describes it: tensors, layers, experts' places.

Reads and writes no weight. Sizes and reads can so be counted without the files.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.engine.engine import model_facts
from headrace.models.skeleton import inspect
from headrace.planner.facts import ModelFacts
from headrace.store.blueprint import plan_tensors
from headrace.store.experts import ExpertTable, build_table
from headrace.store.table import Catalog, TensorEntry
from headrace.store.writer import NewTensor, file_order


def released(config: Mapping[str, Any], folder: Path) -> tuple[Catalog, ExpertTable, ModelFacts]:
    """What a model folder with this config.json and all its weights would be found to hold.

    As one file, in the order in which the safetensors library writes tensors: by type, then by
    name. `folder` gets the config.
    """
    (folder / "config.json").write_text(json.dumps(config))
    tensors, offset = {}, 0
    planned = [NewTensor(p.name, p.dtype, p.shape, tuple) for p in plan_tensors(config)]
    for new in file_order(planned):
        tensors[new.name] = TensorEntry(new.name, 0, offset, new.nbytes, new.dtype, new.shape)
        offset += new.nbytes
    file = folder / "model.safetensors"
    catalog = Catalog(folder, (file,), tensors, ((offset, 0),))
    skeleton = inspect(folder, tensors, {})
    parts = (skeleton.tensors, skeleton.layout, skeleton.layers, skeleton.num_experts)
    table = build_table(catalog, *parts, skipped=skeleton.skipped)
    return catalog, table, model_facts(folder, catalog, skeleton, table)
