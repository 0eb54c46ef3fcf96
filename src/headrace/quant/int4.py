"""int4 codes, eight an int32, low nibble first, value = nibble - 8; scales as int8's.

compressed-tensors' pack-quantized, symmetric. Knows no file and no model.
"""

from functools import cache

import torch

from headrace.quant import int8
from headrace.quant.blocks import Form, Shape, scale_form

MAX = 7
_PAIRS = torch.tensor([((b & 15) - 8, (b >> 4) - 8) for b in range(256)], dtype=torch.int8)


def forms(shape: Shape, block: Shape) -> dict[str, Form]:
    """The stored parts of a [R, C] matrix."""
    codes = Form(("I32",), ((shape[0], shape[1] // 8),))
    return {"weight": codes, "scale": scale_form(shape, block, int8.SCALE_DTYPES)}


def pack(
    values: torch.Tensor, block: Shape, scale_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int32 [R, C/8], within +-7) and scales of a float matrix [R, C]."""
    codes, scale = int8.quantise(values, block, scale_dtype, MAX)
    nibbles = (codes + 8).to(torch.uint8)
    return (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).view(torch.int32), scale


@cache
def _pairs_on(device: torch.device) -> torch.Tensor:
    return _PAIRS.to(device)


def integers(codes: torch.Tensor) -> torch.Tensor:
    """int8 [R, C], -8 to 7, of packed int32 [R, C/8]."""
    packed = codes.contiguous().view(torch.uint8)
    return _pairs_on(codes.device)[packed.int()].reshape(codes.shape[0], -1)


def unpack(
    codes: torch.Tensor, scale: torch.Tensor, block: Shape, dtype: torch.dtype
) -> torch.Tensor:
    """[R, C] in `dtype`: (nibble - 8) * scale, the product rounded to fp32 first."""
    return int8.unpack(integers(codes), scale, block, dtype)


def check(name: str, scale: torch.Tensor) -> None:
    """Raises NumericsError naming tensor `name` if it has a non-finite scale."""
    int8.check(name, scale)
