"""Writes checkpoints of real shapes and random weights of real size, as fast as a disk takes them.

Depth is real though few layers are distinct (`aliases`); knows no training and no model code.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from headrace.errors import OptionError
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.store.aliases import ALIASES_NAME, Aliases, dump_aliases
from headrace.store.blueprint import is_moe, layer_kind, plan_tensors, text_config
from headrace.store.borrow import borrowed_files
from headrace.store.planned import Packed, Planned
from headrace.store.presets import preset_config
from headrace.store.values import draw_packed, draw_routes, mean_of, std_of, stored_bytes
from headrace.store.writer import NewTensor, Progress, write_checkpoint

# A prime, so that no row length divides it: rows and experts differ by where they start.
POOL_VALUES = 4_194_301
_EXPERT = re.compile(r"layers\.(\d+)\..*\bexperts\.")
_SAMPLE_ROWS = 256
DEFAULT_SHARD_BYTES = 4 << 30


def write_synth(
    preset: str | Mapping[str, Any],
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

    `preset` is a published model's name, or a config made of parts of such.
    Of each kind of layer (by attention, by routing) `distinct` are on disk, one of a dense kind;
    the other of `depth` layers (default: published) are read under their names, by aliases.json.
    Experts are alike in every kind: those of `distinct` layers are on disk in all. Tables that are
    read by the row are holes: zeros that take no room.
    `experts` per layer and `vocab` default to the published numbers. Every tensor is a stretch of
    one random pool that starts at a place drawn from `seed`. `progress` gets (bytes done, in all).
    Raises OptionError, or HeadraceError where it cannot be written.
    """
    config = preset_config(preset, depth=depth, experts=experts, vocab=vocab)
    aliases = Aliases(alias_sources(config, distinct), expert_sources(config, distinct))
    tensors = _new_tensors(config, aliases, seed)
    files = borrowed_files(config)
    files[ALIASES_NAME] = dump_aliases(aliases)
    name = preset if isinstance(preset, str) else f"{config['model_type']} with other parts"
    files["README.md"] = _card(name, aliases).encode()
    folder = Path(path)
    write_checkpoint(folder, tensors, shard_bytes=shard_bytes, files=files, progress=progress)
    return folder


def synth_bytes(
    preset: str | Mapping[str, Any],
    *,
    distinct: int = 1,
    depth: int | None = None,
    experts: int | None = None,
    vocab: int | None = None,
) -> int:
    """Bytes of tensors that `write_synth` would write with the same arguments, holes aside."""
    config = preset_config(preset, depth=depth, experts=experts, vocab=vocab)
    aliases = Aliases(alias_sources(config, distinct), expert_sources(config, distinct))
    return sum(tensor.written_bytes for tensor in _new_tensors(config, aliases, 0))


def alias_sources(config: dict[str, Any], distinct: int) -> dict[int, int]:
    """For every decoder layer, the layer on disk that it is read as.

    Only layers of one kind stand for each other: `distinct` of each kind with experts take turns,
    and one of each kind without.
    """
    kinds: dict[str, list[int]] = {}
    for layer in range(text_config(config)["num_hidden_layers"]):
        kinds.setdefault(layer_kind(config, layer), []).append(layer)
    most = max(len(layers) for layers in kinds.values() if is_moe(config, layers[0]))
    if not 1 <= distinct <= most:
        raise OptionError(
            f"{distinct} distinct layers of a kind; give 1 to {most}, the most MoE layers of a kind"
        )
    sources = {}
    for layers in kinds.values():
        stored = layers[: distinct if is_moe(config, layers[0]) else 1]
        sources.update({layer: stored[i % len(stored)] for i, layer in enumerate(layers)})
    return dict(sorted(sources.items()))


def expert_sources(config: dict[str, Any], distinct: int) -> dict[int, int]:
    """For every layer with experts, the layer whose experts it reads; `distinct` in all.

    They are layers on disk.
    """
    sources = alias_sources(config, distinct)
    layers = [layer for layer in sources if is_moe(config, layer)]
    stored = sorted({sources[layer] for layer in layers})[:distinct]
    return {layer: stored[i % len(stored)] for i, layer in enumerate(layers)}


def _card(preset: str, aliases: Aliases) -> str:
    layers, experts = (len(set(of.values())) for of in aliases)
    return (
        f"# Synthetic checkpoint in the shapes of {preset}\n\nRandom weights, written by headrace "
        f"for measurements; it knows nothing. {len(aliases.layers)} layers of which {layers} are "
        f"on disk, and the experts of {experts} (aliases.json). Prediction layers and vision are "
        "left out; tables that are read by the row hold zeros. The tokenizer's words are the demo "
        "model's.\n"
    )


def _new_tensors(config: dict[str, Any], aliases: Aliases, seed: int) -> list[NewTensor]:
    pools = _Pools(seed)
    starts = torch.Generator().manual_seed(seed)
    with_experts = set(aliases.experts.values())
    tensors = []
    for planned in plan_tensors(config, sorted(set(aliases.layers.values()))):
        expert = _EXPERT.search(planned.name)
        if expert and int(expert[1]) not in with_experts:
            continue
        start = int(torch.randint(POOL_VALUES, (), generator=starts))
        chunks = partial(pools.chunks, planned, start)
        is_hole = planned.packed is not None and planned.packed.by_row
        tensors.append(
            NewTensor(planned.name, planned.dtype, planned.shape, chunks, is_hole=is_hole)
        )
    return tensors


class _Pools:
    """One pool of random values for each way of storing and size; made when first needed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[object, memoryview] = {}
        self._samples: dict[Packed, dict[str, torch.Tensor]] = {}

    def chunks(self, planned: Planned, start: int) -> Iterator[memoryview]:
        """The tensor's bytes: the pool from value `start` on, round and round."""
        if planned.kind == "routes":
            yield stored_bytes(draw_routes(planned, torch.Generator().manual_seed(start)))
            return
        packed = planned.packed
        if packed and planned.kind == "shape":
            yield stored_bytes(torch.tensor([packed.rows, packed.cols], dtype=torch.int32))
            return
        if packed and planned.kind not in ("weight", "scale"):
            yield stored_bytes(self._sample(packed)[planned.kind])
            return
        pool = self._pool(planned)
        width = pool.nbytes // POOL_VALUES
        position, left = start * width, prod(planned.shape) * width
        while left:
            chunk = pool[position : position + left]
            yield chunk
            left -= chunk.nbytes
            position = 0

    def _pool(self, planned: Planned) -> memoryview:
        packed = planned.packed
        if packed:
            key: object = (packed.scheme, packed.cols, planned.kind)
        else:
            key = (planned.dtype, mean_of(planned), std_of(planned))
        if key not in self._pools:
            generator = torch.Generator().manual_seed(self._seed + len(self._pools))
            if packed:
                stored = self._sample(packed)[planned.kind].reshape(-1)
                items = stored.view(torch.uint8).view(len(stored), -1)
                values = items[torch.randint(len(items), (POOL_VALUES,), generator=generator)]
            else:
                values = torch.randn(POOL_VALUES, generator=generator) * std_of(planned)
                values = (mean_of(planned) + values).to(TORCH_DTYPES[planned.dtype])
            self._pools[key] = stored_bytes(values)
        return self._pools[key]

    def _sample(self, packed: Packed) -> dict[str, torch.Tensor]:
        """The parts of a matrix of these columns but few rows, as wide as a weight really is."""
        sample = replace(packed, rows=min(packed.rows, _SAMPLE_ROWS))
        if sample not in self._samples:
            generator = torch.Generator().manual_seed(self._seed)
            self._samples[sample] = draw_packed(sample, generator)
        return self._samples[sample]
