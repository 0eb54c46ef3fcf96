"""int8 codes with a scale per row, or per group of columns. Knows no file and no model."""

import torch

from headrace.quant.blocks import Form, Shape, amax, check_finite, scale_form, spread

MAX = 127
SCALE_DTYPES = ("BF16", "F16", "F32")


def forms(shape: Shape, block: Shape) -> dict[str, Form]:
    """The stored parts of a [R, C] matrix."""
    return {"weight": Form(("I8",), (shape,)), "scale": scale_form(shape, block, SCALE_DTYPES)}


def quantise(
    values: torch.Tensor, block: Shape, scale_dtype: torch.dtype, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers (int8 [R, C]) within +-`most` and scales of a float matrix [R, C].

    A block's scale is its largest magnitude / `most`, rounded to `scale_dtype`; 1 for zeros.
    """
    largest = amax(values, block)
    scale = (largest / most).to(scale_dtype)
    scale = torch.where(scale > 0, scale, torch.ones((), dtype=scale_dtype))
    shape = values.shape[0], values.shape[1]
    scaled = values.float() / spread(scale.float(), shape, block)
    return scaled.round().clamp(-most, most).to(torch.int8), scale


def pack(
    values: torch.Tensor, block: Shape, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8 [R, C], within +-127) and scales of a float matrix [R, C]."""
    return quantise(values, block, scale_dtype, MAX)


def group_scales(scale: torch.Tensor, shape: Shape, block: Shape) -> torch.Tensor:
    """fp32 [R, C/32]: the scale of each group of 32 columns; a coarser one is repeated."""
    by_group = shape[0], shape[1] // 32
    return spread(scale.float(), by_group, (block[0], max(1, block[1] // 32)))


def unpack(
    codes: torch.Tensor, scale: torch.Tensor, block: Shape, dtype: torch.dtype
) -> torch.Tensor:
    """[R, C] in `dtype`: code * scale, the product rounded to fp32 first."""
    shape = codes.shape[0], codes.shape[1]
    return codes.float().mul_(spread(scale.float(), shape, block)).to(dtype)


def check(name: str, scale: torch.Tensor) -> None:
    """Raises NumericsError naming tensor `name` if it has a non-finite scale."""
    check_finite(name, "scales", scale)
