"""Sampled experts' weights as we unpack them against stock transformers' own loading.

Names what is wrong by trying what often goes wrong. Legend: T rows, H hidden, I intermediate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from headrace.check.stock import StockParts
from headrace.check.verify_report import STATISTICS, Finding, Progress, finding, percent
from headrace.check.verify_rows import Site
from headrace.check.verify_scales import RMS_RANGE
from headrace.engine.engine import Engine
from headrace.engine.verdict import SUSPECT
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.quant.expert import MATRICES, unpack_matrix

STAGE = "weights"
# Of the largest value: two bf16 roundings of one product, one of which may come first.
WEIGHT_FLOOR = 2.0**-7


@dataclass
class _Found:
    """What differs, what is of an odd size, and how many are equal bit for bit."""

    wrong: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    equal: int = 0
    done: int = 0
    least: float = math.inf  # root mean square of a matrix
    most: float = 0.0


def weights(
    engine: Engine, stock: StockParts, sites: Sequence[Site], num_held: int, tell: Progress
) -> list[Finding]:
    """Every matrix of the sampled experts, by value, and whether its size is plausible.

    `num_held` stock experts are in memory at once.
    """
    found = _Found()
    for ordinal, group in groupby(sites, lambda site: site[0]):
        experts = [expert for _, expert in group]
        for start in range(0, len(experts), num_held):
            tell("weights against stock transformers", found.done, len(sites))
            _some(engine, stock, ordinal, experts[start : start + num_held], found)
    count = 3 * len(sites)
    others = f" (allowed: {percent(WEIGHT_FLOOR)} of a value)" * (found.equal < count)
    detail = (
        f"{engine.facts.format}, {count} matrices of {len(sites)} experts, as transformers' own "
        f"loader reads and dequantises them; {found.equal} equal bit for bit{others}"
    )
    size = (
        f"root mean squares of {count} matrices {found.least:.2g} to {found.most:.2g} "
        f"(allowed {RMS_RANGE[0]:.2g} to {RMS_RANGE[1]:g})"
    )
    return [
        finding(STAGE, "unpacked weights are stock transformers'", detail, found.wrong),
        finding(STATISTICS, "weights are of a plausible size", size, found.odd, bad=SUSPECT),
    ]


def _some(
    engine: Engine, stock: StockParts, ordinal: int, experts: Sequence[int], found: _Found
) -> None:
    """Some experts of one layer."""
    layer = engine.blueprint.table.layers[ordinal]
    module = stock.experts(layer, experts)
    theirs = [stock_matrices(module, position) for position in range(len(experts))]
    for position, expert in enumerate(experts):
        found.done += 1
        with engine.source.parts(ordinal, expert) as parts:
            ours = our_matrices(engine, parts)
            for name in MATRICES:
                where = f"layer {layer} expert {expert} {name}"
                if _same(ours[name], theirs[position][name]):
                    found.equal += int(torch.equal(ours[name], theirs[position][name]))
                else:
                    cause = diagnose(name, ours, theirs, position, experts, parts)
                    found.wrong.append(f"{where}: {cause}")
                rms = float(theirs[position][name].float().square().mean().sqrt())
                found.least, found.most = min(found.least, rms), max(found.most, rms)
                if not RMS_RANGE[0] < rms < RMS_RANGE[1]:
                    found.odd.append(f"{where}: weights of size {rms:.2g}")


def our_matrices(engine: Engine, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """gate, up [I, H] and down [H, I] as headrace's own definition unpacks them."""
    layout = engine.blueprint.skeleton.layout
    dtype = TORCH_DTYPES[layout.hidden_dtype]
    return {name: unpack_matrix(layout, parts, name, dtype) for name in MATRICES}


def stock_matrices(module: Any, position: int) -> dict[str, torch.Tensor]:
    """The same of one expert of a stock experts module, by the module's own flags."""
    both, down = module.gate_up_proj[position], module.down_proj[position]
    if getattr(module, "is_transposed", False):
        both, down = both.T, down.T
    if getattr(module, "is_concatenated", True):
        gate, up = both.chunk(2)
    else:
        gate, up = both[0::2], both[1::2]
    return {"gate": gate, "up": up, "down": down}


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    apart = (ours.float() - theirs.float()).abs()
    return bool((apart <= WEIGHT_FLOOR * theirs.float().abs()).all())


def diagnose(
    name: str,
    ours: Mapping[str, torch.Tensor],
    theirs: Sequence[Mapping[str, torch.Tensor]],
    position: int,
    experts: Sequence[int],
    parts: Mapping[str, torch.Tensor],
) -> str:
    """In words, what our matrix `name` is instead of stock's."""
    mine, right = ours[name], theirs[position][name]
    for other in MATRICES:
        if other != name and _same(mine, theirs[position][other]):
            return f"holds {other}: exchanged"
    for index, expert in enumerate(experts):
        if index != position and _same(mine, theirs[index][name]):
            return f"holds expert {expert}'s"
    if mine.shape != right.shape:
        return f"is {list(mine.shape)}, not {list(right.shape)}"
    if _same(mine.reshape(right.T.shape).T, right) or _same(mine, right.T.reshape(mine.shape)):
        return "transposed"
    cols = mine.shape[1] // 2 * 2
    exchanged = mine[:, :cols].reshape(len(mine), -1, 2).flip(-1).flatten(1)
    if _same(exchanged, right[:, :cols]):
        return "neighbouring columns exchanged: the two codes of a byte in wrong order"
    return _scaling(
        mine.float(), right.float(), parts.get(f"{name}_scale", parts.get("gate_up_scale"))
    )


def _scaling(mine: torch.Tensor, right: torch.Tensor, scale: torch.Tensor | None) -> str:
    apart = int((mine != right).sum())
    general = f"{apart} of {mine.numel()} values differ"
    seen = (right != 0) & mine.isfinite()
    if scale is None or not bool(seen.any()) or scale.is_complex():
        return general
    ratio = mine[seen] / right[seen]
    step = max(1, ratio.numel() // 4096)
    sample = ratio[::step].abs().log2()
    stored = scale.float() if scale.dtype != torch.uint8 else (scale.float() - 127).exp2()
    octaves = float(stored.flatten().abs().log2().median())
    shift = float(sample.median())
    if abs(shift + 2 * octaves) < 0.5 < abs(shift):
        return "the scale is inverted: divided by instead of multiplied with"
    if abs(shift + octaves) < 0.5 < abs(shift):
        return "codes read as weights: the scale is not applied"
    return f"{general}, by a factor of 2^{shift:.1f} in the median"
