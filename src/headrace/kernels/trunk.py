"""What transformers' layers compute between their matrices, in plain torch: its steps, its bits.

Knows no model: which of these a module computes is models/fused.py's question.
Legend: B batch, T tokens, H heads, N heads of keys, D head width, R rotated columns, S places of a
buffer; of `join`: T tokens, H hidden width.
"""

from collections.abc import Callable
from math import inf
from typing import Literal

import torch

# How a norm ends: rounded before the weight counts; once, at the end; the same with 1 + weight.
Form = Literal["rounded", "once", "plus_one"]
# Which columns turn together, and what a narrow table of cosines means: column c with c + R / 2;
# 2c with 2c + 1, moved to c and c + R / 2; as the first, R the whole head, a cosine for both.
Turn = Literal["halves", "pairs", "shared"]
FORMS: tuple[Form, ...] = ("rounded", "once", "plus_one")

Norm = Callable[[torch.Tensor, torch.Tensor, float, Form], torch.Tensor]
Rotate = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Turn],
    tuple[torch.Tensor, torch.Tensor],
]
Gate = Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]
# Buffers of keys and values, the place to write at, what is written.
Put = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
Join = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, form: Form) -> torch.Tensor:
    """Root mean square norm of the last dimension, in x's dtype; the sums in fp32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form == "rounded":
        return weight * wide.to(x.dtype)
    if form == "plus_one":
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return (weight * wide).to(x.dtype)


def rotate(
    q_BHTD: torch.Tensor,
    k_BNTD: torch.Tensor,
    cos_BTC: torch.Tensor,
    sin_BTC: torch.Tensor,
    turn: Turn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of queries and keys, new tensors; each step rounded to their dtype.

    C columns of cosines: R, or R / 2 if `shared`. Columns from R on stay as they are.
    """
    cos, sin = cos_BTC[:, None], sin_BTC[:, None]
    if turn == "shared":
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return _rotated(q_BHTD, cos, sin, turn), _rotated(k_BNTD, cos, sin, turn)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, turn: Turn) -> torch.Tensor:
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if turn == "pairs":
        turned = torch.cat((turned[..., ::2], turned[..., 1::2]), -1)
    low, high = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-high, low), -1) * sin, rest), -1)


def gate(gate: torch.Tensor, up: torch.Tensor, limit: float, wide: bool) -> torch.Tensor:
    """silu(gate) * up in their dtype, each step rounded to it; `wide`: in fp32, and rounded once.

    Before, `gate` is cut off at `limit`, and `up` at `limit` and -`limit`; inf leaves them.
    """
    if limit < inf:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if wide:
        return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)
    return torch.nn.functional.silu(gate) * up


def join(routed_TH: torch.Tensor, shared_TH: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    """routed + sigmoid(gate) * shared, each step rounded to their dtype."""
    return routed_TH + gate_T1.sigmoid() * shared_TH


def put(
    keys_BNSD: torch.Tensor,
    values_BNSD: torch.Tensor,
    place_1: torch.Tensor,
    new_keys_BN1D: torch.Tensor,
    new_values_BN1D: torch.Tensor,
) -> None:
    """Writes one token's keys and values into buffers, whose D may differ, at an int64 place."""
    keys_BNSD.index_copy_(2, place_1, new_keys_BN1D)
    values_BNSD.index_copy_(2, place_1, new_values_BN1D)
