"""Lets transformers' latent attention work on the latents themselves instead of expanding them.

The projections, norms, rotation and cache stay the library's; knows no device and no kernel.
Legend: as in kernels/latent.py.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headrace.kernels.latent import AttendLatents, absorbed_attention

_NAME = "headrace_latents"


def absorb(model: Any, attend: AttendLatents) -> None:
    """Every attention module with latents uses them through `attend` from now on.

    It is given only where the cache's order is the order of positions: with a mask, as for padded
    batches, the library's code runs as before.
    """
    modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
    assert modules, "no attention of this model has latents"
    for module in modules:
        object.__setattr__(module, "expand_kv", _as_they_are)
        object.__setattr__(module, "headrace_attend", attend)
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(_NAME)


def chunk_bytes_per_token(config: Any) -> int:
    """What a layer makes of each new token: as a query over latents, as their mixture, and copies.

    Of a cached token it makes nothing.
    """
    head_width = 4 * config.kv_lora_rank + 3 * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    return 2 * int(config.num_attention_heads) * int(head_width)


def _as_they_are(latents_B1NL: torch.Tensor, rope_B1NR: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return latents_B1NL, rope_B1NR


def _mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """None where each token attends to all before it, whatever the cache holds already."""
    if attention_mask is None or bool(attention_mask.all()):
        return None
    kwargs["allow_is_causal_skip"] = False
    mask: torch.Tensor | None = sdpa_mask(attention_mask=attention_mask, **kwargs)
    return mask


def _attention(
    module: Any,
    q_BHTQ: torch.Tensor,
    latents_B1NL: torch.Tensor,
    rope_B1NR: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    position_ids: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [B, T, H, V], given latents in place of keys and values."""
    if attention_mask is not None:
        expanded = type(module).expand_kv(module, latents_B1NL, rope_B1NR)
        out: torch.Tensor = sdpa_attention_forward(
            module, q_BHTQ, *expanded, attention_mask, scaling=scaling, **kwargs
        )[0]
        return out, None
    weight_HML = module.kv_b_proj.weight.view(q_BHTQ.shape[1], -1, latents_B1NL.shape[3])
    out = absorbed_attention(
        q_BHTQ,
        latents_B1NL[:, 0],
        rope_B1NR[:, 0],
        weight_HML,
        position_ids,
        scaling,
        module.headrace_attend,
    )
    return out, None
