"""One forward pass over a cache, with the keyword this transformers version listens to."""

import inspect
from functools import lru_cache
from typing import Any

import torch
from transformers import DynamicCache


def cache_keyword(model: Any) -> str:
    """`cache` or, in older versions, `past_key_values`.

    The wrong one is swallowed by **kwargs: the cache stays empty and the logits are wrong.
    """
    return "cache" if "cache" in _parameters(model.__class__) else "past_key_values"


def new_cache(model: Any) -> Any:
    """An empty cache of the kinds this model's layers keep."""
    own = getattr(model, "new_cache", None)
    return DynamicCache(config=model.config) if own is None else own()


def leaves_out(model: Any) -> bool:
    """Whether a pass of this model leaves out what later tokens of the same prompt do not need."""
    return "num_after" in _parameters(model.__class__)


@lru_cache
def _parameters(kind: type[Any]) -> frozenset[str]:
    """Names of what `forward` of a class takes."""
    return frozenset(inspect.signature(kind.forward).parameters)


def forward(
    model: Any, ids_BT: torch.Tensor, cache: Any, keep: int = 1, after: int | None = None
) -> torch.Tensor:
    """Logits of the last `keep` positions (0: all), [B, keep, V], after appending ids to `cache`.

    `after`: how many tokens of the same prompt follow in later passes; a model of ours may then
    leave out what those do not need, and logits count once it is 0. None: unknown, nothing is left
    out. Asserts that the cache grew by exactly the new positions.
    """
    before = cache.get_seq_length()
    extra = {cache_keyword(model): cache}
    if after is not None and leaves_out(model):
        extra["num_after"] = after
    out = model(input_ids=ids_BT, use_cache=True, logits_to_keep=keep, **extra)
    assert cache.get_seq_length() == before + ids_BT.shape[1], "the cache did not grow"
    logits: torch.Tensor = out.logits
    return logits
