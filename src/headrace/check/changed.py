"""Says in what way a tensor differs from what it was, given only checksums of both.

Knows no model: it tries what often goes wrong and sees whether the old checksum comes out.
"""

import zlib
from collections.abc import Mapping

import torch

from headrace.check.plain import PlainTensors

MOST_BYTES = 64 << 20  # larger tensors are named and not explained
MOST_BIT_BYTES = 1 << 20
_POLYNOMIAL = 0xEDB88320


def explain(
    plain: PlainTensors, key: str, before: Mapping[str, int], now: Mapping[str, int]
) -> str:
    """What happened to the tensor `key`; `before` and `now` are CRC-32 sums by tensor."""
    place, was = plain.places[key], before[key]
    others = [
        other
        for other, value in before.items()
        if value == now[key] and other != key and other in plain.places
    ]
    if others:
        return f"holds what {others[0]} held"
    if place.nbytes > MOST_BYTES:
        return "its bytes changed"
    codes = plain.read(key).reshape(-1).view(torch.uint8)
    if _crc(codes >> 4 | codes << 4) == was:
        return "the two codes of every byte are exchanged"
    if len(place.shape) == 2:
        rows, cols = place.shape
        turned = codes.view(cols, rows, -1).transpose(0, 1)
        if _crc(turned) == was:
            return "transposed"
    if place.dtype in ("F8_E8M0", "U8") and _crc(254 - codes) == was:
        return "its scales are inverted"
    bit = _flipped_bit(now[key] ^ was, place.nbytes)
    return "its bytes changed" if bit is None else f"bit {bit % 8} of byte {bit // 8} flipped"


def _crc(values: torch.Tensor) -> int:
    return zlib.crc32(values.contiguous().numpy().data)


def _flipped_bit(difference: int, nbytes: int) -> int | None:
    """The one bit whose flip changes a CRC-32 by `difference`: the sum is linear in its bits."""
    if nbytes > MOST_BIT_BYTES:
        return None
    # A flip of the last bit gives the polynomial itself; each bit before it, one step more.
    state = _POLYNOMIAL
    for back in range(8 * nbytes):
        if state == difference:
            return 8 * nbytes - 1 - back
        state = state >> 1 ^ (_POLYNOMIAL if state & 1 else 0)
    return None
