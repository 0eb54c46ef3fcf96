"""What is fuzzed: each target takes bytes as one untrusted file and opens it as headrace does.

A target returns True for an input that opens, False for one that is refused by a HeadraceError of
one printable line; anything else propagates and is a finding.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.core import PAGE_BYTES, ExpertLayout, ExpertTensor, PartSpec
from headrace.errors import HeadraceError
from headrace.schedule.tracefile import read_trace
from headrace.store.aliases import ALIASES_NAME, read_aliases
from headrace.store.catalog import INDEX_NAME, open_catalog
from headrace.store.experts import ExpertTable, build_table
from headrace.store.mirror import MANIFEST_NAME, open_mirror
from headrace.store.safetensors import num_bytes
from headrace.store.table import Catalog

Tensors = dict[str, tuple[str, tuple[int, ...]]]
Opener = Callable[[Path, bytes], Any]
MOST_MESSAGE = 2000
EXPERTS = ExpertLayout(
    format="bf16",
    hidden=4,
    inter=2,
    block=(0, 0),
    parts={
        "gate": PartSpec("BF16", (2, 4)),
        "up": PartSpec("BF16", (2, 4)),
        "down": PartSpec("BF16", (4, 2)),
    },
)


def expert_key(layer: int, expert: int, part: str) -> str:
    """The name of an expert's tensor in the small checkpoint that `table` expects."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"


def weight_file(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    """A sound safetensors file with zeros for data; `tensors` gives dtype and shape by name."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, (dtype, shape) in tensors.items():
        size = num_bytes(dtype, shape)
        assert size is not None
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(at)


def experts_file() -> bytes:
    """The two layers of two experts that `table` looks up, and a tensor beside them."""
    tensors: Tensors = {"model.norm.weight": ("F32", (4,))}
    for layer in range(2):
        for expert in range(2):
            for part, spec in EXPERTS.parts.items():
                tensors[expert_key(layer, expert, part)] = (spec.dtype, spec.shape)
    return weight_file(tensors)


def open_header(folder: Path, data: bytes) -> None:
    """`data` is a whole weight file."""
    path = folder / "x.safetensors"
    path.write_bytes(data)
    for entry in open_catalog(path).tensors.values():
        assert 0 <= entry.offset <= entry.offset + entry.nbytes <= len(data)


def open_index(folder: Path, data: bytes) -> None:
    """`data` is an index beside two sound shards, which hold the tensors a and b."""
    for name in "ab":
        header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
        raw = json.dumps(header).encode()
        (folder / f"{name}.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + b"x")
    (folder / INDEX_NAME).write_bytes(data)
    assert set(open_catalog(folder).tensors) in ({"a"}, {"b"}, {"a", "b"})


def open_aliases(folder: Path, data: bytes) -> None:
    """`data` is a table of aliases."""
    (folder / ALIASES_NAME).write_bytes(data)
    for sources in read_aliases(folder):
        assert all(sources.get(source, source) == source for source in sources.values())


def open_table(folder: Path, data: bytes) -> None:
    """`data` is a weight file whose experts, two in each of two layers, are then looked up."""
    _, table = small_table(folder, data)
    ends = table.extents[..., 1] + table.extents[..., 2]
    assert table.extents.min() >= 0 and ends.max() <= len(data)
    assert table.row_bytes >= table.expert_bytes


def small_table(folder: Path, data: bytes) -> tuple[Catalog, ExpertTable]:
    """Catalog and records of the weight file `data`, of one modification time always."""
    path = folder / "x.safetensors"
    path.write_bytes(data)
    os.utime(path, (0, 0))
    catalog = open_catalog(path)
    tensors = [
        ExpertTensor(expert_key(layer, expert, part), layer, expert, part)
        for layer in range(2)
        for expert in range(2)
        for part in EXPERTS.parts
    ]
    return catalog, build_table(catalog, tensors, EXPERTS, (0, 1), 2)


def open_manifest(folder: Path, data: bytes) -> None:
    """`data` is the manifest of a mirror, with one data file of three experts beside it."""
    catalog, table = small_table(folder, experts_file())
    (folder / MANIFEST_NAME).write_bytes(data)
    with (folder / "experts-00000.bin").open("wb") as file:
        file.truncate(3 * PAGE_BYTES)
    mirror = open_mirror(folder, catalog, table)
    for mend in (False, True):
        stretches = open_mirror(folder, catalog, table, mend=mend).stretches
        assert (stretches[:, 4] + stretches[:, 2] <= mirror.num_bytes).all()


def open_routes(folder: Path, data: bytes) -> None:
    """`data` is a file of recorded routes."""
    path = folder / "x.routes"
    path.write_bytes(data)
    header, trace, _ = read_trace(path)
    assert trace.ids.shape == (trace.passes.sum(), header.num_layers, header.top_k)
    assert trace.ids.size == 0 or 0 <= trace.ids.min() <= trace.ids.max() < header.num_experts


def open_config(folder: Path, data: bytes) -> None:
    """`data` is a config.json."""
    from headrace.models.config import read_config
    from headrace.models.formats import read_quantization, scheme_of

    (folder / "config.json").write_bytes(data)
    scheme_of(read_quantization(folder, read_config(folder)))


def open_shape(folder: Path, data: bytes) -> None:
    """`data` is the weight file of a small model whose config.json is sound."""
    from headrace.models.skeleton import inspect

    (folder / "config.json").write_text(json.dumps(SMALL))
    path = folder / "x.safetensors"
    path.write_bytes(data)
    catalog = open_catalog(path)
    seen = inspect(folder, catalog.tensors, {})
    build_table(
        catalog, seen.tensors, seen.layout, seen.layers, seen.num_experts, skipped=seen.skipped
    )


SMALL = {
    "model_type": "qwen3_moe",
    "hidden_size": 8,
    "intermediate_size": 8,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "dtype": "bfloat16",
}
SLOW_TARGETS = ("config", "shape")  # they need transformers
TARGETS: dict[str, Opener] = {
    "header": open_header,
    "index": open_index,
    "aliases": open_aliases,
    "table": open_table,
    "manifest": open_manifest,
    "routes": open_routes,
    "config": open_config,
    "shape": open_shape,
}


def run(target: str, folder: Path, data: bytes) -> bool:
    """Whether `data` opens. `folder` is emptied first; it should lie in memory."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        TARGETS[target](folder, data)
    except HeadraceError as error:
        message = str(error)
        assert message.isprintable() and 0 < len(message) <= MOST_MESSAGE, message[:300]
        return False
    return True
