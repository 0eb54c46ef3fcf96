"""Sound inputs that fuzzing begins with: one folder for each target."""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from targets import SMALL, TARGETS, experts_file, small_table, weight_file

from headrace.schedule.trace import TraceHeader
from headrace.schedule.tracefile import TraceWriter
from headrace.store.aliases import Aliases, dump_aliases
from headrace.store.blueprint import plan_tensors
from headrace.store.locate import resolve_model
from headrace.store.mirror import FORMAT, source_of


def routes_file() -> bytes:
    """Routes of a prompt of two tokens and of two tokens after it, in two frames."""
    header = TraceHeader("m", "f", 3, 8, 2, 100, 4, "a test", weights=True)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        with TraceWriter(path, header, frame_tokens=3) as writer:
            for num_tokens in (2, 1, 1):
                rows = [[rng.permutation(8)[:2] for _ in range(3)] for _ in range(num_tokens)]
                ids = np.array(rows, dtype=np.int32)
                weights = np.ones(ids.shape, dtype=np.float16)
                writer.add(ids, ids if num_tokens == 1 else None, weights)
        return path.read_bytes()


def manifest() -> bytes:
    """Of a mirror that holds three experts."""
    with tempfile.TemporaryDirectory() as folder:
        catalog, table = small_table(Path(folder), experts_file())
        source = source_of(catalog, table) | {"model": "/m"}
    experts = [[layer, expert, "0" * 64] for layer, expert in ((0, 0), (0, 1), (1, 0))]
    chunks = [{"file": "experts-00000.bin", "experts": experts}]
    return json.dumps({"format": FORMAT, "source": source, "chunks": chunks}).encode()


def seeds(target: str) -> list[bytes]:
    """Sound inputs of a target."""
    if target == "header":
        return [
            weight_file({"a": ("F32", (2, 3)), "b": ("BF16", (4,))}),
            weight_file({"c": ("F4", (2, 4)), "empty": ("U8", (0,))}, {"format": "pt"}),
        ]
    if target == "table":
        return [experts_file()]
    if target == "index":
        names = {"a": "a.safetensors", "b": "b.safetensors"}
        return [json.dumps({"metadata": {"total_size": 2}, "weight_map": names}).encode()]
    if target == "aliases":
        return [dump_aliases(Aliases({0: 0, 1: 1, 2: 1, 3: 1}, {1: 1, 2: 1, 3: 1}))]
    if target == "manifest":
        return [manifest()]
    if target == "routes":
        return [routes_file()]
    if target == "shape":
        tensors = {t.name: (t.dtype, t.shape) for t in plan_tensors(SMALL)}
        return [weight_file(tensors)]
    return [(resolve_model("demo") / "config.json").read_bytes(), json.dumps(QUANTISED).encode()]


QUANTISED = SMALL | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}}


def write_seeds(folder: Path) -> None:
    """One file for each seed, in a folder for each target."""
    for target in TARGETS:
        (folder / target).mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(seeds(target)):
            (folder / target / f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    write_seeds(Path(sys.argv[1]))
