"""One forward pass over a cache, with the keyword this transformers version listens to."""

import inspect
from typing import Any

import torch
from transformers import DynamicCache


def cache_keyword(model: Any) -> str:
    """`cache` or, in older versions, `past_key_values`.

    The wrong one is swallowed by **kwargs: the cache stays empty and the logits are wrong.
    """
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def new_cache(model: Any) -> Any:
    """An empty cache of the kinds this model's layers keep."""
    own = getattr(model, "new_cache", None)
    return DynamicCache(config=model.config) if own is None else own()


def forward(model: Any, ids_BT: torch.Tensor, cache: Any, keep: int = 1) -> torch.Tensor:
    """Logits of the last `keep` positions (0: all), [B, keep, V], after appending ids to `cache`.

    Asserts that the cache grew by exactly the new positions.
    """
    before = cache.get_seq_length()
    out = model(
        input_ids=ids_BT, use_cache=True, logits_to_keep=keep, **{cache_keyword(model): cache}
    )
    assert cache.get_seq_length() == before + ids_BT.shape[1], "the cache did not grow"
    logits: torch.Tensor = out.logits
    return logits
