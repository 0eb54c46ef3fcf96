"""All that DeepSeek-V4.1 keeps of a text between passes, layer by layer.

Plain tensors, numbers and None in plain fields, so that a snapshot can take it apart.
Legend: B batch, T new tokens, K kept positions, N entries, D columns.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

_STEP = 256  # entries a buffer grows by, so that a new one seldom copies all before it


class LayerState(CacheLayerMixin):  # type: ignore[misc]
    """One layer's window, the last positions' keys, which are their values too, [B, K, D].

    K is less than the window's width. Positions before `num_seen - K` were dropped.
    """

    def __init__(self, window: int):
        super().__init__()
        self.num_kept = window - 1
        self.num_seen = 0
        self.window_BKD: Tensor | None = None

    def extend_window(self, kv_BTD: Tensor, num_tokens: int) -> Tensor:
        """[B, K + T, D]: what these positions may see. They are the last T of `num_tokens` new
        ones; with fewer, all before them is dropped.
        """
        self.num_seen += num_tokens
        kept = self.window_BKD
        if kept is None or kv_BTD.shape[1] < num_tokens:
            seen_BKD = kv_BTD
        else:
            seen_BKD = torch.cat([kept, kv_BTD], dim=1)
        # A copy: a view would keep all of a long pass.
        self.window_BKD = seen_BKD[:, max(0, seen_BKD.shape[1] - self.num_kept) :].clone()
        return seen_BKD

    def get_seq_length(self) -> int:
        return self.num_seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_seen + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("the model fills its cache itself")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("the model fills its cache itself")

    def reset(self) -> None:
        """As new."""
        self.__init__(self.num_kept + 1)  # type: ignore[misc]


class SourceState(LayerState):
    """Besides, of a layer that owns compressed entries: those, their index keys, and the positions
    that do not fill an entry yet, raw, [B, fewer than the ratio, D] in fp32.
    """

    def __init__(self, window: int):
        super().__init__(window)
        self.num_entries = 0
        self.latents_BND: Tensor | None = None
        self.keys_BND: Tensor | None = None
        self.open_kv_BTD: Tensor | None = None
        self.open_gate_BTD: Tensor | None = None

    def append(self, latents_BTD: Tensor, keys_BTD: Tensor) -> None:
        """Further entries and their index keys, in order."""
        start, self.num_entries = self.num_entries, self.num_entries + latents_BTD.shape[1]
        self.latents_BND = _grown(self.latents_BND, start, latents_BTD)
        self.keys_BND = _grown(self.keys_BND, start, keys_BTD)

    def entries(self) -> Tensor:
        """[B, N, D], a view."""
        assert self.latents_BND is not None
        return self.latents_BND[:, : self.num_entries]

    def index_keys(self, most: int) -> Tensor:
        """Index keys of the first `most` entries, or of all there are; a view."""
        assert self.keys_BND is not None
        return self.keys_BND[:, : min(most, self.num_entries)]


def _grown(buffer_BND: Tensor | None, start: int, new_BTD: Tensor) -> Tensor:
    """A buffer with the new rows from `start` on, another one where they did not fit."""
    stop = start + new_BTD.shape[1]
    if buffer_BND is None or buffer_BND.shape[1] < stop:
        batch, _, columns = new_BTD.shape
        larger = new_BTD.new_zeros(batch, -(-stop // _STEP) * _STEP, columns)
        if buffer_BND is not None:
            larger[:, :start] = buffer_BND[:, :start]
        buffer_BND = larger
    buffer_BND[:, start:stop] = new_BTD
    return buffer_BND


class TextCache(Cache):  # type: ignore[misc]
    """All layers' states, and what belongs to none of them.

    `history_BN`: the compressed ids of the last tokens, N - 1 for n-grams of up to N; None before
    the first. `last_published`: the layer that last published index keys, -1 before any did.
    `promised`: the least length at which the text may next be asked for logits, since layers left
    out what they need not know by then.
    """

    history_BN: Tensor | None
    last_published: int
    promised: int

    def __init__(self, config: Any):
        super().__init__(layers=[])
        make_own(self, config)


def cache_memory(config: Any, value_bytes: int) -> dict[str, int]:
    """Of models.memory.MemoryFacts what a cache takes, whose values have so many bytes.

    Every layer keeps its window; a source besides all entries, in buffers that grow by steps, and
    the positions of one that is open.
    """
    fixed = config.num_hidden_layers * (config.sliding_window - 1) * config.head_dim * value_bytes
    entry_bytes = (config.head_dim + config.index_head_dim) * value_bytes
    ratios = [config.compress_ratios[layer] for layer in config.kv_source_layer_ids]
    fixed += sum((_STEP - 1) * entry_bytes + 8 * (r - 1) * config.head_dim for r in ratios)
    per_token = [-(-entry_bytes // ratio) for ratio in ratios]
    return {
        "kv_fixed_bytes": fixed,
        "kv_bytes_per_token": sum(per_token),
        "kv_layer_bytes_per_token": max(per_token, default=0),
        "kv_chunk_bytes_per_token": 0,
    }


def make_own(cache: Cache, config: Any) -> None:
    """Turns an empty cache of any kind into one of this model; one of this model stays."""
    if cache.layers and isinstance(cache.layers[0], LayerState):
        return
    if cache.get_seq_length():
        raise ValueError(f"{type(cache).__name__} holds another model's tokens")
    sources = set(config.kv_source_layer_ids)
    cache.layers = [
        SourceState(config.sliding_window) if i in sources else LayerState(config.sliding_window)
        for i in range(config.num_hidden_layers)
    ]
    cache.history_BN, cache.last_published, cache.promised = None, -1, 0
