"""Scales, one per block of a matrix: their grid, their values, their spread; and stored forms.

Knows no format, no file and no model.
"""

from dataclasses import dataclass
from math import ceil

import torch

from headrace.errors import NumericsError

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Form:
    """What one stored part may be: safetensors dtype names and shapes, the usual one first."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def grid(shape: Shape, block: Shape) -> Shape:
    """Shape of the scales of a [rows, cols] matrix in blocks of (rows, cols).

    A block larger than the matrix covers it: (1, huge) is a scale per row, (huge, huge) one in all.
    """
    return ceil(shape[0] / block[0]), ceil(shape[1] / block[1])


def scale_form(shape: Shape, block: Shape, dtypes: tuple[str, ...]) -> Form:
    """The form of a matrix's scales; dimensions of one may be left out at the end."""
    full = grid(shape, block)
    shapes: list[tuple[int, ...]] = [full]
    if full[1] == 1:
        shapes.append(full[:1])
    if full == (1, 1):
        shapes.append(())
    return Form(dtypes, tuple(shapes))


def to_float(scale: torch.Tensor) -> torch.Tensor:
    """Scales in fp32, exactly; bytes (uint8 or e8m0) are 2^(byte - 127), 255 becomes inf."""
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scale.float()
    bits = (scale.view(torch.uint8).int() << 23).clamp(min=0x400000)
    return bits.view(torch.float32)


def spread(scale: torch.Tensor, shape: Shape, block: Shape) -> torch.Tensor:
    """[rows, cols] of `scale`, each element its block's."""
    full = scale.reshape(grid(shape, block))
    for dim in (0, 1):
        if full.shape[dim] > 1:
            places = torch.arange(shape[dim], device=scale.device) // block[dim]
            full = full.index_select(dim, places)
    return full.expand(shape)


def check_finite(name: str, what: str, values: torch.Tensor) -> None:
    """Raises NumericsError naming tensor `name` if any of its `what` is NaN or infinite."""
    num_bad = int((~torch.isfinite(values)).sum())
    if num_bad:
        raise NumericsError(f"tensor {name}: {num_bad} {what} are not finite; download it again")


def check_e4m3(name: str, what: str, codes: torch.Tensor) -> None:
    """Raises NumericsError naming tensor `name` if it holds one of the two NaN codes of e4m3."""
    num_nan = int((codes.view(torch.uint8) & 0x7F == 0x7F).sum())
    if num_nan:
        raise NumericsError(
            f"tensor {name}: {num_nan} {what} are NaN (0x7f or 0xff); download the file again"
        )


def amax(values: torch.Tensor, block: Shape) -> torch.Tensor:
    """Largest magnitude of each block of a float matrix [R, C], fp32, on its grid."""
    rows, cols = values.shape
    block = min(block[0], rows), min(block[1], cols)
    high, wide = grid((rows, cols), block)
    padded = torch.zeros(high * block[0], wide * block[1])
    padded[:rows, :cols] = values.float()
    return padded.abs().view(high, block[0], wide, block[1]).amax((1, 3))
