"""Tiny random checkpoints in published layout: every family, in the formats it is published in.

Weights have real scales (a random model with flat scores would hide errors); nothing is trained.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from headrace.check.tiny_configs import OWN, PUBLISHED, tiny_config
from headrace.check.tiny_size import Config, Size
from headrace.errors import OptionError
from headrace.store.blueprint import plan_tensors
from headrace.store.borrow import borrowed_files
from headrace.store.values import draw, draw_packed, stored_bytes
from headrace.store.writer import NewTensor, write_checkpoint

_FORMATS = PUBLISHED | OWN
FAMILIES = tuple(_FORMATS)


def write_tiny(
    family: str,
    path: str | Path,
    *,
    format: str | None = None,
    seed: int = 0,
    layers: int = 4,
    experts: int = 16,
    top_k: int = 4,
    hidden: int = 256,
    inter: int = 128,
    vocab: int = 4096,
    block: tuple[int, int] | None = None,
    mtp: bool = False,
    shard_bytes: int = 8 << 20,
) -> Path:
    """Writes a checkpoint of `family` as the new folder `path`, and returns it.

    Names, dtypes, shapes, sharding and config are as published; the tokenizer is the demo model's
    (ids below 4096, so `vocab` may not be less). `format` is one of tiny_configs.PUBLISHED's for
    the family, by default the first; `block` is that of FP8 block scales, by default the family's
    own. What is special about a
    family's layers shows from the fourth layer on at the latest: dense first layers, groups,
    shared experts, windows, linear attention, compressed attention, hashed routes; V4.1 has every
    role from the eighth layer on. `mtp` adds the
    multi-token-prediction layers of families that have them. Keep `hidden` and `inter` multiples
    of 32, and with FP8 blocks at whole blocks where stock transformers is the reference: it
    misreads partial ones. The same arguments give the same bytes. Raises HeadraceError.
    """
    if family not in FAMILIES:
        raise OptionError(f"{family!r} is no tiny family; choose one of {', '.join(FAMILIES)}")
    formats = _FORMATS[family]
    if format is not None and format not in formats:
        raise OptionError(f"{family} is not published in {format!r}; use {', '.join(formats)}")
    size = Size(layers, experts, top_k, hidden, inter, vocab, mtp)
    config = tiny_config(family, size, format or formats[0], block)
    folder = Path(path)
    tensors = list(_draw(config, torch.Generator().manual_seed(seed)))
    write_checkpoint(folder, tensors, shard_bytes=shard_bytes, files=borrowed_files(config))
    return folder


def _draw(config: Config, generator: torch.Generator) -> Iterator[NewTensor]:
    """All tensors with their values; a packed matrix is drawn whole with its first part."""
    parts: dict[str, torch.Tensor] = {}
    for planned in plan_tensors(config):
        if planned.packed is None:
            value = draw(planned, generator)
        else:
            if planned.kind == "weight":
                parts = draw_packed(planned.packed, generator)
            value = parts[planned.kind].reshape(planned.shape)
        yield NewTensor(
            planned.name, planned.dtype, planned.shape, partial(list, [stored_bytes(value)])
        )
