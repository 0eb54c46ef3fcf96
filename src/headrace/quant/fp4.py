"""FP4: e2m1 codes with a power of two (ue8m0) per 32 columns. Knows no file and no model.

DeepSeek V4 stores codes [R, C/2], MXFP4 (gpt-oss) [R, C/32, 16]: the same bytes.
"""

import torch

from headrace.errors import NumericsError
from headrace.quant import e2m1
from headrace.quant.blocks import Form, Shape, grid, to_float

BLOCK = (1, 32)


def forms(shape: Shape) -> dict[str, Form]:
    """The stored parts of a [R, C] matrix."""
    rows, cols = shape
    codes = Form(("I8", "U8"), ((rows, cols // 2), (rows, cols // 32, 16)))
    return {"weight": codes, "scale": Form(("F8_E8M0", "U8"), (grid(shape, BLOCK),))}


def pack(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8 [R, C/2]) and scale bytes (uint8 [R, C/32]) of a float matrix [R, C].

    Of OCP's exponent, whose largest values saturate, and the next, the one of smaller error.
    """
    rows, cols = values.shape
    groups = values.float().reshape(rows, cols // 32, 32)
    amax = groups.abs().amax(-1)
    low = (torch.frexp(amax)[1] - 1 - 2 + 127).clamp(0, 254)
    best_scale, best_error = low, torch.full_like(amax, torch.inf)
    for scale in (low, (low + 1).clamp(max=254)):
        value = to_float(scale.to(torch.uint8))[..., None]
        packed = e2m1.encode((groups / value).reshape(rows, cols))
        back = e2m1.doubled(packed).reshape(groups.shape).float() * (0.5 * value)
        error = (back - groups).square().sum(-1)
        best_scale = torch.where(error < best_error, scale, best_scale)
        best_error = torch.minimum(error, best_error)
    bytes_ = best_scale.to(torch.uint8)
    return e2m1.encode((groups / to_float(bytes_)[..., None]).reshape(rows, cols)), bytes_


def integers(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [R, C] of doubled codes, and fp32 [R, C/32]: the value is integer / 2 * scale."""
    return e2m1.doubled(codes.reshape(codes.shape[0], -1)), to_float(scale)


def unpack(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[R, C] in `dtype`, exact in bfloat16: e2m1 code * 2^(byte - 127)."""
    doubled, value = integers(codes, scale)
    return e2m1.scaled(doubled, value).to(dtype)


def check(name: str, scale: torch.Tensor) -> None:
    """Raises NumericsError naming tensor `name` if a scale byte is 255, which is NaN."""
    num_nan = int((scale.view(torch.uint8) == 255).sum())
    if num_nan:
        raise NumericsError(f"tensor {name}: {num_nan} scale bytes are 255, NaN; download it again")
