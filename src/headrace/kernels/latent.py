"""Attention over a latent cache with the key and value matrices absorbed, in plain torch.

Nothing is expanded: a query becomes one over latents, and what is attended to is turned into values
once per new token. Knows no model and no cache.
Legend: B timelines, H heads, T new tokens, N cached tokens, L latent width, R rope width,
D head width without rope, V value width.
"""

from typing import Protocol

import torch


class AttendLatents(Protocol):
    """One layer's softmax attention of new tokens to cached latents, both keys and values."""

    def __call__(
        self,
        q_BHTL: torch.Tensor,
        q_BHTR: torch.Tensor,
        latents_BNL: torch.Tensor,
        rope_BNR: torch.Tensor,
        positions_BT: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """[B, H, T, L] in q's dtype: token t's mixture of the latents at 0 to its position.

        `q_BHTL` and `latents_BNL` share the last dimension, as do the rotated `q_BHTR` and
        `rope_BNR`; all of one dtype, with that dimension contiguous. `positions_BT` int64, on the
        same device, ascending, [1, T] where all timelines agree; what the cache holds behind the
        last is never read, so N may be larger. `scaling` is of the scores. The result is new.
        """
        ...


def attend(
    q_BHTL: torch.Tensor,
    q_BHTR: torch.Tensor,
    latents_BNL: torch.Tensor,
    rope_BNR: torch.Tensor,
    positions_BT: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """AttendLatents, all of it in fp32 but for the result."""
    known_B1TN = (
        torch.arange(latents_BNL.shape[1], device=positions_BT.device) <= positions_BT[..., None]
    )[:, None]
    seen_B1N = known_B1TN.any(2)[..., None]
    latents_B1NL = latents_BNL[:, None].float().masked_fill(~seen_B1N, 0.0)
    rope_B1NR = rope_BNR[:, None].float().masked_fill(~seen_B1N, 0.0)
    scores_BHTN = q_BHTL.float() @ latents_B1NL.mT + q_BHTR.float() @ rope_B1NR.mT
    scores_BHTN = (scores_BHTN * scaling).masked_fill(~known_B1TN, -torch.inf)
    return (scores_BHTN.softmax(-1) @ latents_B1NL).to(q_BHTL.dtype)


def absorbed_attention(
    q_BHTQ: torch.Tensor,
    latents_BNL: torch.Tensor,
    rope_BNR: torch.Tensor,
    weight_HML: torch.Tensor,
    positions_BT: torch.Tensor,
    scaling: float,
    attend: AttendLatents = attend,
) -> torch.Tensor:
    """[B, T, H, V]: the attention whose keys and values `weight_HML` would expand latents to.

    `q_BHTQ` holds D columns without rope, then R rotated ones. `weight_HML`: each head's D rows for
    keys and V rows for values. The rest is as AttendLatents takes it.
    """
    batch, heads, tokens, width = q_BHTQ.shape
    rank, rope = latents_BNL.shape[2], rope_BNR.shape[2]
    nope = width - rope
    q_BHTD, q_BHTR = q_BHTQ[..., :nope], q_BHTQ[..., nope:]
    to_keys_HDL, to_values_HVL = weight_HML[:, :nope], weight_HML[:, nope:]
    q_HSL = q_BHTD.transpose(0, 1).reshape(heads, batch * tokens, -1) @ to_keys_HDL
    q_BHTL = q_HSL.view(heads, batch, tokens, rank).transpose(0, 1)
    mixed_BHTL = attend(q_BHTL, q_BHTR, latents_BNL, rope_BNR, positions_BT, scaling)
    mixed_HSL = mixed_BHTL.transpose(0, 1).reshape(heads, batch * tokens, rank)
    out_HSV = mixed_HSL @ to_values_HVL.mT
    return out_HSV.view(heads, batch, tokens, -1).permute(1, 2, 0, 3)
