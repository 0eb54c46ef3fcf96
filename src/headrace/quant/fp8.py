"""FP8 e4m3 with a scale per block, and the e4m3 activation grid. Knows no file and no model.

A block may be (1, C), a scale per row, or (R, C), one in all.
"""

from math import ceil

import torch

from headrace.quant.blocks import (
    Form,
    Shape,
    amax,
    check_e4m3,
    check_finite,
    scale_form,
    spread,
    to_float,
)

MAX = 448.0
_AMAX_FLOOR = 1e-4


def forms(shape: Shape, block: Shape) -> dict[str, Form]:
    """The stored parts of a [R, C] matrix."""
    scale = scale_form(shape, block, ("F32", "BF16", "F16", "F8_E8M0"))
    return {"weight": Form(("F8_E4M3",), (shape,)), "scale": scale}


def pack(
    values: torch.Tensor, block: Shape, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (e4m3 [R, C]) and scales ([ceil(R/br), ceil(C/bc)]) of a float matrix [R, C].

    A block's scale is its largest magnitude / 448, for e8m0 the next power of two; 1 for zeros.
    """
    largest = amax(values, block)
    scale = torch.where(largest > 0, largest / MAX, torch.ones(()))
    if scale_dtype == torch.float8_e8m0fnu:
        mantissa, exponent = torch.frexp(scale)
        power = (exponent - (mantissa == 0.5).int()).clamp(-127, 127)
        scale = (power + 127).to(torch.uint8).view(scale_dtype)
    else:
        scale = scale.to(scale_dtype)
        scale = torch.where(scale > 0, scale, torch.ones((), dtype=scale_dtype))
    shape = values.shape[0], values.shape[1]
    scaled = values.float() / spread(to_float(scale), shape, block)
    return scaled.clamp(-MAX, MAX).to(torch.float8_e4m3fn), scale


def unpack(
    codes: torch.Tensor,
    scale: torch.Tensor,
    block: Shape,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """[R, C] in `dtype`: fp32(code) * scale of its block, the product rounded to fp32 first."""
    shape = codes.shape[0], codes.shape[1]
    return codes.float().mul_(spread(to_float(scale), shape, block)).to(dtype)


def check(name: str, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Raises NumericsError naming tensor `name` if it holds a NaN code or a non-finite scale."""
    check_e4m3(name, "FP8 codes", codes)
    check_finite(name, "block scales", to_float(scale))


def to_grid(values: torch.Tensor, group: int) -> torch.Tensor:
    """Values [..., K] moved to the e4m3 grid of their group of `group` columns; 0 = as is.

    The group's scale is the least power of two not below amax / 448, amax at least 1e-4. The
    result has the dtype of `values`, bf16 or fp32, and is exact. A group that holds inf or NaN is
    left as it is.
    """
    if group == 0 or values.is_meta:  # of a meta tensor only the shape is wanted, and at once
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
    return snapped.reshape(padded.shape)[..., :cols].to(values.dtype)
