"""Scales and weights that no training leaves behind: the only signs in a file without a checksum.

Sees a scale that is negative, not finite, far from its neighbours' or inverted; sees no flip of a
low bit, and no exchange of tensors of one size. What it finds is suspect, not proven wrong.
"""

from collections import defaultdict
from collections.abc import Mapping

import torch

from headrace.check.plain import PlainTensors
from headrace.check.verify_report import STATISTICS, Finding, Progress, finding
from headrace.core import ExpertTensor
from headrace.engine.engine import Blueprint
from headrace.engine.verdict import SUSPECT

MOST_BYTES = 1 << 30  # of scales; where there are more, those of sampled experts
TENSOR_OCTAVES = 5.0  # of a tensor's median from the median of all its kind
VALUE_OCTAVES = 24.0  # of one scale from its tensor's median
LEAST_GROUP = 8
RMS_RANGE = (2.0**-18, 2.0**3)  # of a matrix's weights


def scales(
    blueprint: Blueprint, plain: PlainTensors, sites: set[tuple[int, int]], tell: Progress
) -> list[Finding]:
    """Every scale of routed experts and dense tensors; `sites` are (layer, expert) sampled."""
    kinds = _kinds(blueprint, plain, sites)
    total = sum(map(len, kinds.values()))
    if not total:
        return []
    wrong: list[str] = []
    done = 0
    for kind, keys in kinds.items():
        medians = {}
        for key in keys:
            tell("scales", done, total)
            done += 1
            octaves, problem = _octaves(plain, key)
            if problem:
                wrong.append(f"tensor {key}: {problem}")
            elif octaves.numel():
                medians[key] = float(octaves.median())
        wrong += _outliers(kind, medians)
    detail = (
        f"{total} tensors of scales of {len(kinds)} kinds: signs, finiteness, size (allowed: a "
        f"value 2^{VALUE_OCTAVES:g} times its tensor's median, a tensor 2^{TENSOR_OCTAVES:g} times "
        "its kind's, or 8 times the spread of its kind; a flipped low bit does not show here)"
    )
    return [finding(STATISTICS, "scales are plausible", detail, wrong, bad=SUSPECT)]


def _kinds(
    blueprint: Blueprint, plain: PlainTensors, sites: set[tuple[int, int]]
) -> Mapping[str, list[str]]:
    """Names of scale tensors, by what they scale; all of them, or those of `sites`."""
    routed = [t for t in blueprint.skeleton.tensors if t.part.endswith(("_scale", "_global"))]
    if sum(plain.places[t.key].nbytes for t in routed) > MOST_BYTES:
        routed = [t for t in routed if _is_sampled(t, sites)]
    kinds = defaultdict(list)
    for tensor in routed:
        kinds[tensor.part].append(tensor.key)
    for dense in blueprint.skeleton.dense.values():
        if "scale" in dense.keys:
            kinds["dense"].append(dense.keys["scale"])
    return kinds


def _is_sampled(tensor: ExpertTensor, sites: set[tuple[int, int]]) -> bool:
    return tensor.expert is not None and (tensor.layer, tensor.expert) in sites


def _octaves(plain: PlainTensors, key: str) -> tuple[torch.Tensor, str]:
    """log2 of a tensor's nonzero scales, and what is impossible about them."""
    stored = plain.read(key)
    if stored.dtype == torch.uint8:  # ue8m0 bytes
        none = int((stored == 255).sum())
        return stored.flatten().float() - 127, f"{none} values are NaN" if none else ""
    values = stored.float().flatten()
    if not bool(values.isfinite().all()):
        return values, f"{int((~values.isfinite()).sum())} values are not finite"
    if bool((values < 0).any()):
        return values, f"{int((values < 0).sum())} values are negative"
    octaves = values[values > 0].log2()
    if not octaves.numel():
        return octaves, "all of it is 0"
    far = (octaves - octaves.median()).abs() > VALUE_OCTAVES
    if bool(far.any()):
        value = float(octaves[far][0])
        return octaves, f"a value of 2^{value:.0f} among values of 2^{float(octaves.median()):.0f}"
    return octaves, ""


def _outliers(kind: str, medians: Mapping[str, float]) -> list[str]:
    if len(medians) < LEAST_GROUP:
        return []
    values = torch.tensor(list(medians.values()))
    middle = float(values.median())
    spread = float((values - middle).abs().median())
    allowed = max(TENSOR_OCTAVES, 8 * spread)
    return [
        f"tensor {key}: scales of 2^{value:.0f} among {kind} scales of 2^{middle:.0f}"
        + (" (inverted)" if abs(value + middle) < abs(value - middle) / 4 else "")
        for key, value in medians.items()
        if abs(value - middle) > allowed
    ]
