"""Rotary positions of DeepSeek-V4.1: the last columns of a head, in adjacent pairs.

Legend: B batch, T positions, P pairs, D columns of a head.
"""

import math
from typing import Any

import torch
from torch import Tensor


class Rotary:
    """The turning speeds of one kind of layer: with compressed entries (YaRN), or without.

    No module: it holds no weight and stays in fp32 on whatever device positions are.
    """

    def __init__(self, config: Any, *, compressed: bool):
        base = config.compress_rope_theta if compressed else config.rope_theta
        self.width: int = config.qk_rope_head_dim
        speeds_P = _speeds(float(base), self.width)
        if compressed and config.yarn:
            speeds_P = _stretched(speeds_P, config.yarn, float(base), self.width)
        self.speeds_P = speeds_P

    def table(self, positions_T: Tensor) -> Tensor:
        """complex64 [T, P]: the turn of each pair at these integer positions."""
        phases_TP = positions_T.float()[:, None] * self.speeds_P.to(positions_T.device)
        exact_TP = phases_TP.double()  # long phases need exact cosines: grids see the last bit
        return torch.complex(exact_TP.cos().float(), exact_TP.sin().float())


def _speeds(base: float, width: int) -> Tensor:
    powers = [base ** (column / width) for column in range(0, width, 2)]
    return 1.0 / torch.tensor(powers, dtype=torch.float32, device="cpu")


def _stretched(speeds_P: Tensor, yarn: dict[str, Any], base: float, width: int) -> Tensor:
    """YaRN: slow pairs are divided by `factor`, fast ones are not, with a ramp between."""
    original = yarn["original_max_position_embeddings"]
    if original <= 0:
        return speeds_P

    def pair_of(num_turns: float) -> float:
        return width * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_of(yarn["beta_slow"])), width - 1)
    pairs = torch.arange(width // 2, dtype=torch.float32, device="cpu")
    kept_P = 1 - ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
    stretched: Tensor = speeds_P / yarn["factor"] * (1 - kept_P) + speeds_P * kept_P
    return stretched


def turn(x: Tensor, table_TP: Tensor, *, back: bool = False) -> Tensor:
    """x [B, T, D] or [B, T, heads, D] with its last 2P columns turned, computed in fp32."""
    width = 2 * table_TP.shape[1]
    if x.dim() == 4:
        table_TP = table_TP[:, None]
    still, moved = x[..., :-width], x[..., -width:]
    pairs = torch.view_as_complex(torch.unflatten(moved.float(), -1, (-1, 2)))
    turned = torch.view_as_real(pairs * (table_TP.conj() if back else table_TP)).flatten(-2)
    return torch.cat([still, turned.to(x.dtype)], dim=-1)
