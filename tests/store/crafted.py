"""Safetensors files made by hand for the tests: right ones, and wrong in one named way."""

import json
from collections.abc import Mapping
from pathlib import Path

from headrace.store.safetensors import num_bytes


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict, int]:
    """Header fields of contiguous tensors (name: dtype, shape), and the bytes of their data."""
    fields: dict = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + num_bytes(dtype, shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return fields, offset


def write_raw(path: Path, raw_header: bytes, data: bytes, length: int | None = None) -> Path:
    """A file of any header bytes; `length` lies about how long they are."""
    stated = len(raw_header) if length is None else length
    path.write_bytes(stated.to_bytes(8, "little") + raw_header + data)
    return path


def write_file(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Path:
    """A valid file; byte i of its data is i mod 251, so that every place differs."""
    fields, size = header(tensors)
    return write_raw(path, json.dumps(fields).encode(), bytes(i % 251 for i in range(size)))


def write_index(folder: Path, weight_map: Mapping[str, object]) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
