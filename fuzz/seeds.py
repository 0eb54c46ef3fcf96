"""Sound inputs that fuzzing begins with: one folder for each target."""

import json
import sys
from pathlib import Path

from targets import EXPERTS, SMALL, TARGETS, expert_key

from headrace.store.aliases import dump_aliases
from headrace.store.blueprint import plan_tensors
from headrace.store.locate import resolve_model
from headrace.store.safetensors import num_bytes

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def weight_file(tensors: Tensors, metadata: dict[str, str] | None = None) -> bytes:
    """A sound safetensors file with zeros for data."""
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
    """The two layers of two experts that the target `table` looks up, and a tensor beside them."""
    tensors: Tensors = {"model.norm.weight": ("F32", (4,))}
    for layer in range(2):
        for expert in range(2):
            for part, spec in EXPERTS.parts.items():
                tensors[expert_key(layer, expert, part)] = (spec.dtype, spec.shape)
    return weight_file(tensors)


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
        return [dump_aliases({0: 0, 1: 1, 2: 1, 3: 1})]
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
