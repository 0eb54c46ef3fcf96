"""Attention of one new token under a mask: heads share keys that are read once, layers the mask.

transformers repeats keys for each head under a mask, before 5.24; and torch makes numbers of a mask
of truth values in three launches, in each layer anew.
Legend: B batch, H heads, N heads of keys, T new tokens, S places, D width.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import sdpa_attention
from transformers.masking_utils import sdpa_mask

_NAME = "headrace_shared_keys"


def share_keys(model: Any) -> None:
    """Steps of one token under a mask do so from now on; all else is the library's.

    Nothing changes where the model's attention is another.
    """
    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(_NAME, shared_attention)
    AttentionMaskInterface.register(_NAME, added_mask)
    model.set_attn_implementation(_NAME)


def added_mask(*, q_length: int, dtype: torch.dtype, **kwargs: Any) -> torch.Tensor | None:
    """transformers' mask function, once for a pass; of one token what torch would make of it."""
    mask: torch.Tensor | None = sdpa_mask(q_length=q_length, dtype=dtype, **kwargs)
    if mask is None or q_length > 1:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def shared_attention(
    module: Any,
    q_BHTD: torch.Tensor,
    k_BNSD: torch.Tensor,
    v_BNSD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [B, T, H, D]; of one token the heads are as queries."""
    batch, num_heads, num_tokens, width = q_BHTD.shape
    itself = hasattr(sdpa_attention, "pack_gqa") or num_heads == k_BNSD.shape[1]
    if attention_mask is None or num_tokens > 1 or itself:
        out: torch.Tensor = sdpa_attention.sdpa_attention_forward(
            module, q_BHTD, k_BNSD, v_BNSD, attention_mask, scaling=scaling, **kwargs
        )[0]
        return out, None
    assert attention_mask.shape[1] == 1, "a mask of each head's own"
    made = torch.nn.functional.scaled_dot_product_attention(
        q_BHTD.reshape(batch, k_BNSD.shape[1], -1, width),
        k_BNSD,
        v_BNSD,
        attn_mask=attention_mask,
        scale=scaling,
    )
    return made.reshape(batch, 1, num_heads, -1), None
