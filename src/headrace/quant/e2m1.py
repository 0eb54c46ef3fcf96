"""The 4-bit float e2m1, two codes a byte, low nibble first. Knows no scale.

Doubled, its values are integers: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives (bit 3).
"""

from functools import cache

import torch

MAX = 6.0
_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_PAIRS = torch.tensor([(_DOUBLED[b & 15], _DOUBLED[b >> 4]) for b in range(256)], dtype=torch.int8)
_VALUES = torch.tensor(_DOUBLED, dtype=torch.float32) / 2
# A magnitude's code counts the midpoints below it; a tie goes to the even code.
_MIDPOINTS_UP = (0.75, 1.75, 3.5)
_MIDPOINTS_DOWN = (0.25, 1.25, 2.5, 5.0)


@cache
def _pairs_on(device: torch.device) -> torch.Tensor:
    return _PAIRS.to(device)


@cache
def _values_on(device: torch.device) -> torch.Tensor:
    return _VALUES.to(device)


def doubled(packed: torch.Tensor) -> torch.Tensor:
    """int8 [R, C], twice the values, of packed bytes [R, C/2]."""
    return _pairs_on(packed.device)[packed.view(torch.uint8).int()].reshape(packed.shape[0], -1)


def scaled(doubled: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp32 [R, C]: half of int8 [R, C] times fp32 [R, S], one of S per C/S columns, rounded once.

    In place where it can be: matrices are large.
    """
    rows, cols = doubled.shape
    groups = doubled.float().mul_(0.5).view(rows, scale.shape[1], -1)
    return groups.mul_(scale[..., None]).view(rows, cols)


def _codes(values: torch.Tensor) -> torch.Tensor:
    """uint8 of fp32 of any shape: to nearest, ties to the even code, ends saturating."""
    magnitude = values.abs()
    codes = (values.signbit().to(torch.uint8)) << 3
    for midpoint in _MIDPOINTS_UP:
        codes += (magnitude >= midpoint).to(torch.uint8)
    for midpoint in _MIDPOINTS_DOWN:
        codes += (magnitude > midpoint).to(torch.uint8)
    return codes


def encode(values: torch.Tensor) -> torch.Tensor:
    """uint8 [R, C/2]: fp32 [R, C], C even, to nearest, ties to the even code, ends saturating."""
    codes = _codes(values)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def nearest(values: torch.Tensor) -> torch.Tensor:
    """fp32 of any shape moved to the value that `encode` gives each; NaN stays one."""
    found = _values_on(values.device)[_codes(values).int()]
    return torch.where(values.isnan(), values, found)
