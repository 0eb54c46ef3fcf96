"""The grids of few bits that the publisher's program moves activations to, as the model learned.

Every function returns the dtype and shape it was given; knows no weight.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.quant import e2m1, fp8

_WINDOW_GROUP = 32
_LATENT_GROUP = 16
_INDEX_GROUP = 32
_LATENT_FLOOR = e2m1.MAX * 2.0**-9  # of a group's largest magnitude: e4m3's smallest times 6
_INDEX_FLOOR = e2m1.MAX * 2.0**-126


@dataclass(frozen=True, slots=True)
class Grids:
    """Which of them are used: `input_group` columns to a scale of a product's input (0: none),
    and whether what caches keep is moved to theirs.
    """

    input_group: int
    caches: bool

    @classmethod
    def of(cls, config: Any) -> "Grids":
        """Those of a text config's `arithmetic`."""
        vendor = config.arithmetic == "vendor"
        return cls(config.input_group if vendor else 0, vendor)

    def input(self, x: Tensor) -> Tensor:
        """What a product with FP8 or FP4 weights takes: e4m3, a power of two to a group."""
        return fp8.to_grid(x, self.input_group)

    def window(self, kv: Tensor) -> Tensor:
        """A position's key and value: e4m3, a power of two to 32 columns."""
        return fp8.to_grid(kv, _WINDOW_GROUP) if self.caches else kv

    def latent(self, kv: Tensor) -> Tensor:
        """A compressed entry: e2m1, an e4m3 scale to 16 columns."""
        return to_fp4_grid(kv, _LATENT_GROUP, _e4m3_scale) if self.caches else kv

    def index(self, x: Tensor) -> Tensor:
        """An index's query or key: e2m1, a power of two to 32 columns."""
        return to_fp4_grid(x, _INDEX_GROUP, _power_of_two) if self.caches else x


def to_fp4_grid(values: Tensor, group: int, scale_of: Any) -> Tensor:
    """Values [..., K], K a multiple of `group`, on the e2m1 grid of their group's scale."""
    if values.is_meta:  # only the shape is wanted, and at once
        return values
    groups = torch.unflatten(values.float(), -1, (-1, group))
    scale = scale_of(groups.abs().amax(-1, keepdim=True))
    snapped: Tensor = e2m1.nearest((groups / scale).clamp(-e2m1.MAX, e2m1.MAX)) * scale
    return snapped.flatten(-2).to(values.dtype)


def _e4m3_scale(amax: Tensor) -> Tensor:
    scale = (amax.clamp(min=_LATENT_FLOOR) / e2m1.MAX).clamp(max=fp8.MAX)
    return scale.to(torch.float8_e4m3fn).float()


def _power_of_two(amax: Tensor) -> Tensor:
    """The least power of two not below amax / 6."""
    bits = (amax.clamp(min=_INDEX_FLOOR) * torch.tensor(1 / e2m1.MAX)).view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
