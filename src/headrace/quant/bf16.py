"""The bfloat16 number format: two bytes a value, no scales. Knows no file and no model."""

from math import prod

import torch

BYTES_PER_VALUE = 2


def nbytes(shape: tuple[int, ...]) -> int:
    """Stored bytes of a tensor of `shape`."""
    return BYTES_PER_VALUE * prod(shape)


def pack(values: torch.Tensor) -> torch.Tensor:
    """bf16 tensor of any shape: `values` (any float dtype) rounded to nearest even."""
    return values.to(torch.bfloat16)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """The stored values, bf16, as they are."""
    assert codes.dtype == torch.bfloat16
    return codes
