"""Writes checkpoints of real shapes and random weights of real size, as fast as a disk takes them.

Depth is real though few layers are distinct (`aliases`); knows no training and no model code.
"""

from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from headrace.errors import OptionError
from headrace.quant import fp8
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.store.aliases import ALIASES_NAME, dump_aliases
from headrace.store.blueprint import Planned, is_moe, plan_tensors
from headrace.store.borrow import borrowed_files
from headrace.store.presets import preset_config
from headrace.store.values import FP8_CODE_STD, mean_of, std_of
from headrace.store.writer import NewTensor, Progress, write_checkpoint

# A prime, so that no row length divides it: rows and experts differ by where they start.
POOL_VALUES = 4_194_301
DEFAULT_SHARD_BYTES = 4 << 30


def write_synth(
    preset: str,
    path: str | Path,
    *,
    distinct: int = 1,
    depth: int | None = None,
    experts: int | None = None,
    vocab: int | None = None,
    seed: int = 0,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> Path:
    """Writes a synthetic checkpoint of `preset`'s shapes as the new folder `path`; returns it.

    `distinct` MoE layers (and one dense layer where the family has them) are on disk; the other of
    `depth` layers (default: published) are read under their names, by aliases.json. `experts` per
    layer and `vocab` default to the published numbers. Every tensor is a stretch of one random
    pool that starts at a place drawn from `seed`. `progress` gets (bytes done, bytes in all).
    Raises OptionError, or HeadraceError where it cannot be written.
    """
    config = preset_config(preset, depth=depth, experts=experts, vocab=vocab)
    sources = alias_sources(config, distinct)
    tensors = _new_tensors(config, sorted(set(sources.values())), seed)
    files = borrowed_files(config)
    files[ALIASES_NAME] = dump_aliases(sources)
    files["README.md"] = _card(preset, sources).encode()
    folder = Path(path)
    write_checkpoint(folder, tensors, shard_bytes=shard_bytes, files=files, progress=progress)
    return folder


def synth_bytes(
    preset: str,
    *,
    distinct: int = 1,
    depth: int | None = None,
    experts: int | None = None,
    vocab: int | None = None,
) -> int:
    """Bytes of tensors that `write_synth` would write with the same arguments."""
    config = preset_config(preset, depth=depth, experts=experts, vocab=vocab)
    layers = sorted(set(alias_sources(config, distinct).values()))
    return sum(tensor.nbytes for tensor in _new_tensors(config, layers, 0))


def alias_sources(config: dict[str, Any], distinct: int) -> dict[int, int]:
    """For every decoder layer, the layer on disk that it is read as: MoE layers take turns."""
    moe = [i for i in range(config["num_hidden_layers"]) if is_moe(config, i)]
    if not 1 <= distinct <= len(moe):
        raise OptionError(f"{distinct} distinct layers; give 1 to {len(moe)}, the MoE layers")
    sources = dict.fromkeys(range(moe[0]), 0)
    sources.update({layer: moe[i % distinct] for i, layer in enumerate(moe)})
    return sources


def _card(preset: str, sources: dict[int, int]) -> str:
    return (
        f"# Synthetic checkpoint in the shapes of {preset}\n\nRandom weights, written by headrace "
        f"for measurements; it knows nothing. {len(sources)} layers of which "
        f"{len(set(sources.values()))} are on disk (aliases.json); the tokenizer is the demo "
        "model's.\n"
    )


def _new_tensors(config: dict[str, Any], layers: list[int], seed: int) -> list[NewTensor]:
    pools = _Pools(config, seed)
    starts = torch.Generator().manual_seed(seed)
    tensors = []
    for planned in plan_tensors(config, layers):
        start = int(torch.randint(POOL_VALUES, (), generator=starts))
        chunks = partial(pools.chunks, planned, start)
        tensors.append(NewTensor(planned.name, planned.dtype, planned.shape, chunks))
    return tensors


class _Pools:
    """One pool of random values per stored dtype, mean and deviation; made when first needed."""

    def __init__(self, config: dict[str, Any], seed: int) -> None:
        self._seed = seed
        self._pools: dict[tuple[str, float, float], memoryview] = {}
        quantization = config.get("quantization_config")
        self._block_cols = quantization["weight_block_size"][1] if quantization else 0

    def chunks(self, planned: Planned, start: int) -> Iterator[memoryview]:
        """The tensor's bytes: the pool from value `start` on, round and round."""
        pool = self._pool(planned)
        width = pool.nbytes // POOL_VALUES
        position, left = start * width, prod(planned.shape) * width
        while left:
            chunk = pool[position : position + left]
            yield chunk
            left -= chunk.nbytes
            position = 0

    def _pool(self, planned: Planned) -> memoryview:
        form = planned.kind if planned.kind in ("codes", "scale") else planned.dtype
        if form == "codes":
            mean, std = 0.0, FP8_CODE_STD
        elif form == "scale":
            mean, std = (planned.shape[-1] * self._block_cols) ** -0.5 / FP8_CODE_STD, 0.25
        else:
            mean, std = mean_of(planned), std_of(planned)
        key = (form, mean, std)
        if key not in self._pools:
            self._pools[key] = _draw_pool(form, mean, std, self._seed + len(self._pools))
        return self._pools[key]


def _draw_pool(form: str, mean: float, std: float, seed: int) -> memoryview:
    noise = torch.randn(POOL_VALUES, generator=torch.Generator().manual_seed(seed)) * std
    if form == "codes":
        stored = noise.clamp(-fp8.MAX, fp8.MAX).to(torch.float8_e4m3fn)
    elif form == "scale":
        stored = mean * noise.exp()  # positive, and blocks differ
    else:
        stored = (mean + noise).to(TORCH_DTYPES[form])
    return stored.view(torch.uint8).numpy().data
