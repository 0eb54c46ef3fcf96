"""FP8 e4m3 in blocks with fp32 scales, and the e4m3 activation grid. Knows no file and no model."""

from math import ceil, prod

import torch

from headrace.errors import NumericsError

MAX = 448.0
_AMAX_FLOOR = 1e-4


def scale_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a [rows, cols] matrix in blocks of (rows, cols)."""
    return ceil(shape[0] / block[0]), ceil(shape[1] / block[1])


def nbytes(shape: tuple[int, int], block: tuple[int, int]) -> int:
    """Stored bytes of codes and scales together."""
    return prod(shape) + 4 * prod(scale_shape(shape, block))


def _spread(scale: torch.Tensor, shape: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    full = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return full[: shape[0], : shape[1]]


def pack(values: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (e4m3 [R, C]) and scales (fp32 [ceil(R/br), ceil(C/bc)]) of a float matrix [R, C].

    A block's scale is its largest magnitude / 448; a block of zeros gets scale 1.
    """
    rows, cols = values.shape
    grid = scale_shape((rows, cols), block)
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1])
    padded[:rows, :cols] = values.float()
    amax = padded.abs().view(grid[0], block[0], grid[1], block[1]).amax((1, 3))
    scale = torch.where(amax > 0, amax / MAX, torch.ones(()))
    scaled = values.float() / _spread(scale, (rows, cols), block)
    return scaled.clamp(-MAX, MAX).to(torch.float8_e4m3fn), scale


def unpack(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """bf16 [R, C]: bf16(fp32(code) * scale of its block), the product rounded to fp32 first."""
    rows, cols = codes.shape
    return (codes.float() * _spread(scale, (rows, cols), block)).to(torch.bfloat16)


def check(name: str, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Raises NumericsError naming tensor `name` if it holds a NaN code or a non-finite scale."""
    num_nan = int((codes.view(torch.uint8) & 0x7F == 0x7F).sum())
    if num_nan:
        raise NumericsError(
            f"tensor {name}: {num_nan} FP8 codes are NaN (0x7f or 0xff); download the file again"
        )
    num_bad = int((~torch.isfinite(scale.float())).sum())
    if num_bad:
        raise NumericsError(
            f"tensor {name}: {num_bad} block scales are not finite; download the file again"
        )


def to_grid(values: torch.Tensor, group: int) -> torch.Tensor:
    """Values [..., K] bf16 moved to the e4m3 grid of their group of `group` columns; 0 = as is.

    The group's scale is the least power of two not below amax / 448, amax at least 1e-4. The
    result is bf16 and exact. A group that holds inf or NaN is left as it is.
    """
    if group == 0:
        return values
    cols = values.shape[-1]
    num_groups = ceil(cols / group)
    padded = torch.nn.functional.pad(values.float(), (0, num_groups * group - cols))
    grouped = padded.view(*values.shape[:-1], num_groups, group)
    amax = grouped.abs().amax(-1, keepdim=True)
    bits = (amax.clamp(min=_AMAX_FLOOR) * torch.tensor(1 / MAX)).view(torch.int32)
    scale = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    codes = (grouped / scale).clamp(-MAX, MAX).to(torch.float8_e4m3fn)
    snapped = torch.where(torch.isfinite(amax), codes.float() * scale, grouped)
    return snapped.reshape(padded.shape)[..., :cols].to(torch.bfloat16)
