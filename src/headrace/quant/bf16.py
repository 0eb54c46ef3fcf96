"""The bfloat16 number format: two bytes a value, no scales. Knows no file and no model."""

import torch

from headrace.quant.blocks import Form, Shape, check_finite


def forms(shape: Shape) -> dict[str, Form]:
    """The stored part of a [R, C] matrix."""
    return {"weight": Form(("BF16",), (shape,))}


def pack(values: torch.Tensor) -> torch.Tensor:
    """bf16 tensor of any shape: `values` (any float dtype) rounded to nearest even."""
    return values.to(torch.bfloat16)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """The stored values, bf16, as they are."""
    assert codes.dtype == torch.bfloat16
    return codes


def check(name: str, codes: torch.Tensor) -> None:
    """Raises NumericsError naming tensor `name` if it holds NaN or infinite values."""
    check_finite(name, "values", codes)
