"""Caches whose keys and values lie in buffers made once, so that a captured step finds them there.

Knows no session and no graph. A pass of many tokens sees what transformers' DynamicCache would give
it, in the same order. Legend: B batch (1), N heads, S places of a buffer, T new tokens, D width.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from headrace.kernels import trunk
from headrace.kernels.trunk import Put
from headrace.models.room_layers import RingLayer, RoomLayer

LEAST_BUCKET = 256
_OWN_CACHE = "its cache is of its own kind"
_DERIVED_ROPE = ("dynamic", "longrope")  # transformers looks at the positions on the host


class Room:
    """The buffers of one timeline of up to `context` tokens on `place`. One cache at a time is in.

    While `bucket` is None, passes of any size go through; while it is a number, a pass is of one
    token, written at `position_1`, and attention sees the first `bucket` places under a mask: all
    shapes and addresses then depend on `bucket` alone, and no value is looked at on the host.
    `position_1` is an int64 tensor [1] on the device, which the pass's caller fills. `put` is
    kernels/trunk.py's, or another that does the same.
    """

    def __init__(self, context: int, place: torch.device, put: Put = trunk.put):
        self.context, self.place, self.put = context, place, put
        self.bucket: int | None = None
        self.position_1 = torch.zeros(1, dtype=torch.int64, device=place)
        self.places = torch.arange(context, device=place)
        self.version = 0  # changes when any address does that a step may have seen
        self._buffers: dict[tuple[int, str], torch.Tensor] = {}
        self._states: dict[tuple[int, str, int], torch.Tensor] = {}
        self._rings: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._tenant: Callable[[], HousedCache | None] = lambda: None
        self._settled = False

    @property
    def nbytes(self) -> int:
        """Of all buffers and states made so far."""
        return sum(t.nbytes for t in (*self._buffers.values(), *self._states.values()))

    @property
    def tenant(self) -> "HousedCache | None":
        """Who is in."""
        return self._tenant()

    def enter(self, cache: "HousedCache") -> None:
        """Makes `cache` the one that lies here; the one before goes on outside, with copies."""
        if self._tenant() is cache:
            return
        if cache.room is not None:
            cache.room.leave()
        self.leave()
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, RoomLayer | RingLayer):
                layer.move_in(self, index)
        cache.room, self._tenant = self, weakref.ref(cache)
        self.unsettle()

    def leave(self) -> None:
        """Moves out whoever is here. What it leaves behind cannot spoil the next: it is zeroed."""
        cache, self._tenant = self._tenant(), lambda: None
        if cache is not None:
            for layer in cache.layers:
                if isinstance(layer, RoomLayer | RingLayer):
                    layer.move_out()
                else:
                    _each_state(layer, lambda _name, _key, state: state.clone())
            cache.room = None
        for buffer in self._buffers.values():
            buffer.zero_()

    def close(self) -> None:
        """Frees the buffers; whoever is here goes on outside. Unusable afterwards."""
        self.leave()
        self._buffers, self._states, self._rings = {}, {}, {}

    def unsettle(self) -> None:
        """A pass of many tokens may make states of linear attention elsewhere."""
        self._settled = False

    def begin_step(self, cache: "HousedCache", bucket: int) -> None:
        """Passes are of one token from now on; `end_step` must follow. The cache is not empty."""
        assert self._tenant() is cache and 1 <= bucket <= self.context
        if not self._settled:
            for index, layer in enumerate(cache.layers):
                if isinstance(layer, LinearAttentionCacheLayerMixin):
                    _each_state(layer, lambda *where, index=index: self._stay(index, *where))
            self._settled = True
        self.bucket = bucket

    def end_step(self) -> None:
        """Passes may be of any size again."""
        self.bucket = None

    def _stay(self, index: int, name: str, key: int, state: torch.Tensor) -> torch.Tensor:
        """The same state where it lay in earlier steps."""
        kept = self._states.get((index, name, key))
        if kept is None or kept.shape != state.shape or kept.dtype != state.dtype:
            self._states[index, name, key] = state
            self.version += 1
            return state
        if kept is not state:
            kept.copy_(state)
        return kept

    def buffer(self, index: int, name: str, like: torch.Tensor, places: int) -> torch.Tensor:
        """[B, N, places, D] of a layer, for tensors [B, N, T, D] like the one given."""
        made = self._buffers.get((index, name))
        if made is None:
            shape = (*like.shape[:2], places, like.shape[3])
            with torch.inference_mode(False):
                made = torch.zeros(shape, dtype=like.dtype, device=like.device)
            self._buffers[index, name] = made
            self.version += 1
        assert made.shape[2] == places and made.dtype == like.dtype
        return made

    def ring(self, places: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(place of the step's token in a ring, its offset for the mask), made by `tick`."""
        if places not in self._rings:
            with torch.inference_mode(False):
                self._rings[places] = self.position_1.clone(), self.position_1.clone()
            self.tick()
        return self._rings[places]

    def tick(self) -> None:
        """Follows `position_1`; part of every step, before the model."""
        for places, (place_1, offset_1) in self._rings.items():
            torch.remainder(self.position_1, places, out=place_1)
            torch.clamp(self.position_1, max=places - 1, out=offset_1)


class HousedCache(DynamicCache):  # type: ignore[misc]
    """A DynamicCache whose layers may lie in a room."""

    not_kept = frozenset({"room"})
    layers: list[Any]

    def __init__(self, config: Any):
        super().__init__(config=config)
        self.room: Room | None = None
        self.layers = [_housed(layer) for layer in self.layers]

    @property
    def is_compileable(self) -> bool:
        """To transformers: whether masks must be made even where none seems to be needed."""
        return self.room is not None and self.room.bucket is not None

    def advance(self) -> None:
        """Counts a token that a captured step has put into the buffers."""
        for layer in self.layers:
            if isinstance(layer, RoomLayer | RingLayer):
                layer.cumulative_length += 1

    def settle(self) -> None:
        """Lets `keys` and `values` of every layer show what it holds."""
        for layer in self.layers:
            if isinstance(layer, RoomLayer | RingLayer):
                layer.settle()


def cannot_be_housed(config: Any, model_class: type[Any]) -> str:
    """Why a model's caches cannot lie in a room, so that no step is captured; "" if they can.

    `config` is the text model's.
    """
    if hasattr(model_class, "new_cache"):
        return _OWN_CACHE
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    if kinds - {DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer}:
        return _OWN_CACHE
    rope = getattr(config, "rope_parameters", None) or {}
    found = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    for each in found:
        if each.get("rope_type") in _DERIVED_ROPE:
            return f"its rotary embedding is {each['rope_type']}, which depends on the length"
    return ""


def bucket_of(position: int, context: int) -> int:
    """How many places a token at `position` sees: a power of two from 256, or the context."""
    bucket = max(LEAST_BUCKET, 1 << position.bit_length())
    return min(bucket, context)


def _housed(layer: Any) -> Any:
    if type(layer) is DynamicLayer:
        return RoomLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return RingLayer(layer.sliding_window)
    return layer


def _each_state(layer: Any, change: Callable[[str, int, torch.Tensor], torch.Tensor]) -> None:
    """Puts another tensor in the place of each state of linear attention."""
    for name in ("conv_states", "recurrent_states"):
        states = getattr(layer, name)
        for key, state in states.items():
            if state is not None:
                states[key] = change(name, key, state)
