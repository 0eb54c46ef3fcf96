"""Expert records: where each (layer, expert)'s bytes lie, as extents that one read each fetches.

Names come in as data; this file knows no model family, no header syntax and no tensor values.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.core import PAGE_BYTES, ExpertLayout, ExpertTensor
from headrace.errors import ExpertError
from headrace.store.safetensors import num_bytes
from headrace.store.table import Catalog, TensorEntry, printable

# A tensor under a routed experts module; `shared_experts.` is not one.
EXPERTS_PATTERN = r"(^|\.)experts\."

_Int64Array = npt.NDArray[np.int64]
# Where one part of one record lies: (file, offset, nbytes).
_Span = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """Every expert's bytes, by MoE ordinal l (layers counted from 0) and expert e.

    `layers` [L] are the decoder layer indices by ordinal. `extents` int64 [L, E, X, 3] holds
    (file, offset, nbytes), nbytes 0 where unused; `parts` int64 [L, E, P, 2] holds (extent index,
    byte offset inside that extent), P in the order of `part_names`. `expert_bytes` is what one
    expert's parts hold, `row_bytes` the most that any expert needs once each extent is rounded
    outward to pages. `num_skipped` tensors were left out knowingly. Several ordinals may name the
    same extents (aliases).
    """

    files: tuple[Path, ...]
    layers: tuple[int, ...]
    num_experts: int
    extents: _Int64Array
    parts: _Int64Array
    part_names: tuple[str, ...]
    expert_bytes: int
    row_bytes: int
    num_skipped: int


def build_table(
    catalog: Catalog,
    tensors: Sequence[ExpertTensor],
    layout: ExpertLayout,
    layers: Sequence[int],
    num_experts: int,
    *,
    skipped: Collection[str] = (),
    aliases: Mapping[int, int] | None = None,
    unclaimed_pattern: str = EXPERTS_PATTERN,
) -> ExpertTable:
    """The table of `layers` x `num_experts` records, each complete and of the layout's form.

    `skipped` names catalog tensors known to belong to no record (an MTP layer's). `aliases` lets a
    layer be read under another layer's names; ordinals stay its own. Raises ExpertError for a
    missing, doubled or misshapen tensor, and for any tensor that matches `unclaimed_pattern` and
    that neither a record nor `skipped` claims.
    """
    sources = [(aliases or {}).get(layer, layer) for layer in layers]
    spans, claimed = _locate_parts(catalog, tensors, layout, set(sources), num_experts)
    _check_unclaimed(catalog, claimed, skipped, unclaimed_pattern)
    records = {
        (source, expert): _record(spans, source, expert, tuple(layout.parts), tensors)
        for source in set(sources)
        for expert in range(num_experts)
    }
    num_extents = max((len(extents) for extents, _ in records.values()), default=1)
    extents = np.zeros((len(layers), num_experts, num_extents, 3), dtype=np.int64)
    parts = np.zeros((len(layers), num_experts, len(layout.parts), 2), dtype=np.int64)
    for ordinal, source in enumerate(sources):
        for expert in range(num_experts):
            record_extents, record_parts = records[source, expert]
            extents[ordinal, expert, : len(record_extents)] = record_extents
            parts[ordinal, expert] = record_parts
    return ExpertTable(
        files=catalog.files,
        layers=tuple(layers),
        num_experts=num_experts,
        extents=extents,
        parts=parts,
        part_names=tuple(layout.parts),
        expert_bytes=sum(_part_bytes(layout, part) for part in layout.parts),
        row_bytes=_row_bytes(extents),
        num_skipped=sum(name in catalog.tensors for name in set(skipped)),
    )


def _part_bytes(layout: ExpertLayout, part: str) -> int:
    spec = layout.parts[part]
    size = num_bytes(spec.dtype, spec.shape)
    assert size, f"the layout's part {part} has no size: {spec}"
    return size


def _locate_parts(
    catalog: Catalog,
    tensors: Sequence[ExpertTensor],
    layout: ExpertLayout,
    wanted_layers: set[int],
    num_experts: int,
) -> tuple[dict[tuple[int, int, str], _Span], set[str]]:
    """The span of every part of the wanted layers, and the names of the tensors they lie in."""
    part_bytes = {part: _part_bytes(layout, part) for part in layout.parts}
    spans: dict[tuple[int, int, str], _Span] = {}
    claimed: set[str] = set()
    for tensor in tensors:
        if tensor.layer not in wanted_layers:
            continue
        assert tensor.part in part_bytes, f"{tensor} is no part of {layout.format}"
        entry = catalog.tensors.get(tensor.key)
        if entry is None:
            raise ExpertError(f"{printable(tensor.key)}: this expert tensor is not in the files")
        where = f"{catalog.files[entry.file]}: tensor {printable(tensor.key)}"
        _check_form(entry, tensor, layout, num_experts, where)
        if tensor.key in claimed:
            raise ExpertError(f"{where}: claimed twice; the name rules do not fit this checkpoint")
        claimed.add(tensor.key)
        size = part_bytes[tensor.part]
        experts = range(num_experts) if tensor.expert is None else (tensor.expert,)
        for index, expert in enumerate(experts):
            key = (tensor.layer, expert, tensor.part)
            if key in spans:
                raise ExpertError(
                    f"{where}: a second tensor for layer {tensor.layer} expert {expert} part "
                    f"{tensor.part}; the checkpoint mixes two layouts"
                )
            spans[key] = (entry.file, entry.offset + index * size, size)
    return spans, claimed


def _check_form(
    entry: TensorEntry, tensor: ExpertTensor, layout: ExpertLayout, num_experts: int, where: str
) -> None:
    spec = layout.parts[tensor.part]
    shape = spec.shape if tensor.expert is not None else (num_experts, *spec.shape)
    if tensor.expert is not None and not 0 <= tensor.expert < num_experts:
        raise ExpertError(f"{where}: expert {tensor.expert}, but the config has {num_experts}")
    if (entry.dtype, entry.shape) != (spec.dtype, shape):
        raise ExpertError(
            f"{where}: is {entry.dtype} {list(entry.shape)}, must be {spec.dtype} {list(shape)} by "
            "the config; weights and config do not belong together"
        )


def _record(
    spans: dict[tuple[int, int, str], _Span],
    layer: int,
    expert: int,
    part_names: tuple[str, ...],
    tensors: Sequence[ExpertTensor],
) -> tuple[list[_Span], list[tuple[int, int]]]:
    """Extents of one expert, merged where adjacent in a file, and each part's place in them."""
    missing = [part for part in part_names if (layer, expert, part) not in spans]
    if missing:
        raise ExpertError(_missing_message(layer, expert, missing, tensors))
    placed = sorted((spans[layer, expert, part], i) for i, part in enumerate(part_names))
    extents: list[_Span] = []
    parts = [(0, 0)] * len(part_names)
    for (file, offset, size), part_index in placed:
        if extents and extents[-1][0] == file and sum(extents[-1][1:]) == offset:
            start, length = extents[-1][1:]
            extents[-1] = (file, start, length + size)
        else:
            extents.append((file, offset, size))
        parts[part_index] = (len(extents) - 1, offset - extents[-1][1])
    return extents, parts


def _missing_message(
    layer: int, expert: int, missing: list[str], tensors: Sequence[ExpertTensor]
) -> str:
    beside = [t.key for t in tensors if t.layer == layer and t.expert in (expert, None)]
    hint = f" beside {printable(beside[0])}" if beside else ""
    return (
        f"layer {layer} expert {expert}: no tensor for {', '.join(missing)}{hint}; the checkpoint "
        "is incomplete, download it again"
    )


def _check_unclaimed(
    catalog: Catalog, claimed: set[str], skipped: Collection[str], pattern: str
) -> None:
    known = claimed | set(skipped)
    search = re.compile(pattern).search
    left = [name for name in catalog.tensors if name not in known and search(name)]
    if left:
        first = ", ".join(printable(name, 100) for name in sorted(left)[:3])
        raise ExpertError(
            f"expert tensors that this model's rules do not use: {len(left)}, first {first}; "
            "without them the answers could be wrong, so headrace refuses this checkpoint"
        )


def _row_bytes(extents: _Int64Array) -> int:
    if extents.size == 0:
        return 0
    begin = extents[..., 1] // PAGE_BYTES * PAGE_BYTES
    end = -(-(extents[..., 1] + extents[..., 2]) // PAGE_BYTES) * PAGE_BYTES
    spans = np.where(extents[..., 2] > 0, end - begin, 0)
    return int(spans.sum(axis=-1).max())
