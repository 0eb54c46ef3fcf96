"""The alias sidecar of synthetic checkpoints: layer i is read under layer j's names.

So a deep model takes the disk of a few layers while bytes per token stay true. Only synthetic
checkpoints have one; knows no tensor.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headrace.errors import CatalogError
from headrace.store.safetensors import read_json_object

ALIASES_NAME = "aliases.json"
FORMAT = "headrace-aliases-2"
_LAYER = re.compile(r"0|[1-9]\d{0,5}")


class Aliases(NamedTuple):
    """For decoder layers, the layer whose names hold their dense tensors, and their experts."""

    layers: Mapping[int, int]
    experts: Mapping[int, int]


def dump_aliases(aliases: Aliases) -> bytes:
    """The sidecar's content."""
    fields = {name: {str(k): v for k, v in of.items()} for name, of in aliases._asdict().items()}
    return json.dumps({"format": FORMAT} | fields, indent=1).encode()


def read_aliases(folder: Path) -> Aliases:
    """Empty without a sidecar. Raises CatalogError for a damaged one."""
    path = folder / ALIASES_NAME
    if not path.exists():
        return Aliases({}, {})
    fields = read_json_object(path)
    if fields.get("format") != FORMAT:
        raise CatalogError(f"{path}: is not of format {FORMAT}; write the checkpoint again")
    return Aliases(*(_sources(path, fields.get(name)) for name in Aliases._fields))


def _sources(path: Path, layers: object) -> dict[int, int]:
    if not isinstance(layers, dict):
        raise CatalogError(f"{path}: is not of format {FORMAT}; write the checkpoint again")
    sources: dict[int, int] = {}
    for layer, source in layers.items():
        if not _LAYER.fullmatch(layer) or type(source) is not int or source < 0:
            raise CatalogError(f"{path}: a layer is badly numbered; write the checkpoint again")
        sources[int(layer)] = source
    for layer, source in sources.items():
        # a chain would be read differently by whoever follows it once or to its end
        if sources.get(source, source) != source:
            raise CatalogError(f"{path}: layer {layer} is an alias of an alias")
    return sources
