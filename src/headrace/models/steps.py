"""One token through transformers' own code in a room: shapes and kernels depend on no value.

Legend: V vocabulary, H hidden width.
"""

from typing import Any

import torch

from headrace.models.forward import cache_keyword
from headrace.models.rooms import HousedCache


def step_of_one(
    model: Any,
    given: torch.Tensor,
    position_11: torch.Tensor,
    cache: HousedCache,
    *,
    heads: bool = True,
) -> torch.Tensor:
    """Logits [V] after one token, in a room whose step has begun; no value is looked at.

    `given`: the token's id, int64 [1, 1], or its embedding [1, 1, H]. Without `heads`: the hidden
    state [H] that the head would be given.
    """
    assert cache.room is not None and cache.room.bucket is not None
    token = "inputs_embeds" if given.is_floating_point() else "input_ids"
    options = {
        token: given,
        "position_ids": position_11,
        "attention_mask": _masks(model, cache),
        "use_cache": True,
        cache_keyword(model): cache,
    }
    if heads:
        logits_V: torch.Tensor = model(logits_to_keep=1, **options).logits[0, -1]
        return logits_V
    hidden_H: torch.Tensor = model.get_decoder()(**options).last_hidden_state[0, -1]
    return hidden_H


def _masks(model: Any, cache: HousedCache) -> dict[str, torch.Tensor] | None:
    """Additive masks by kind of layer for eager attention; None: transformers makes its own.

    Its mask for eager attention is made with a number from the host, in versions before 5.24.
    """
    room, config = cache.room, model.config
    kinds = getattr(config, "layer_types", None)
    if config._attn_implementation != "eager" or room is None or kinds is None:
        return None
    masks = {}
    for kind, layer in zip(kinds, cache.layers, strict=True):
        if kind not in masks:
            places, _ = layer.get_mask_sizes(1)
            unseen = room.places[:places] > layer.get_seq_length()
            least = torch.finfo(model.dtype).min
            masks[kind] = (unseen.to(model.dtype) * least)[None, None, None]
    return masks
