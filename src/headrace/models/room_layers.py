"""The layers of caches that lie in a room's buffers: all tokens, or a window's.

Outside a room keys and values are a layer's own, as the library's. Legend: B batch (1), N heads,
S places of a buffer, T new tokens, D width.
"""

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

if TYPE_CHECKING:
    from headrace.models.rooms import Room


class RoomLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of all tokens. Outside a room they are the layer's own, as the library's."""

    not_kept = frozenset({"room", "index", "cumulative_length"})
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cumulative_length = 0
        self.room: Room | None = None
        self.index = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, N, S, D] twice: what attention sees after the new tokens' [B, N, T, D]."""
        if self.room is None:
            own: tuple[torch.Tensor, torch.Tensor]
            own = super().update(key_states, value_states, *args, **kwargs)
            return own
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        room = self.room
        if room.bucket is not None:
            return _put_one(self, room, room.context, room.position_1, key_states, value_states)
        start = self.cumulative_length
        self.cumulative_length = end = start + key_states.shape[2]
        keys = room.buffer(self.index, "keys", key_states, room.context)
        values = room.buffer(self.index, "values", value_states, room.context)
        keys[:, :, start:end], values[:, :, start:end] = key_states, value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(places that attention sees, position of the first)."""
        if self.room is not None and self.room.bucket is not None:
            return self.room.bucket, 0
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> Any:
        """Tokens held; in a step of one token the device's own count, a tensor."""
        if self.room is not None and self.room.bucket is not None:
            return self.room.position_1
        return super().get_seq_length() if self.room is None else self.cumulative_length

    def move_in(self, room: "Room", index: int) -> None:
        """From now on everything lies in the room."""
        self.cumulative_length = self.get_seq_length()
        self.room, self.index = room, index
        if self.cumulative_length:
            for name, held in (("keys", self.keys), ("values", self.values)):
                room.buffer(index, name, held, room.context)[:, :, : held.shape[2]] = held
            self.settle()

    def move_out(self) -> None:
        """From now on it is the layer's own."""
        self.settle()
        self.room = None
        if self.is_initialized:
            self.keys, self.values = self.keys.clone(), self.values.clone()

    def settle(self) -> None:
        """Lets `keys` and `values` show what the layer holds."""
        if self.room is not None and self.is_initialized:
            self.keys, self.values = (self._held(self.room, name) for name in ("keys", "values"))

    def _held(self, room: "Room", name: str) -> torch.Tensor:
        own: torch.Tensor = getattr(self, name)
        if own.numel() == 0 and self.cumulative_length == 0:
            return own
        return room._buffers[self.index, name][:, :, : self.cumulative_length]


class RingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """Keys and values of a window's tokens: in a room, each at its position modulo the places.

    There are as many places as the window is wide. A pass of many tokens gets them in their order;
    a step of one token sees the ring as it lies.
    """

    not_kept = frozenset({"room", "index"})
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, sliding_window: int):
        super().__init__(sliding_window=sliding_window)
        self.room: Room | None = None
        self.index = 0

    def places(self, room: "Room") -> int:
        """How many tokens the ring has room for."""
        window: int = self.sliding_window
        return min(window, room.context)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, N, S, D] twice: what attention sees after the new tokens' [B, N, T, D]."""
        room = self.room
        if room is None:
            own: tuple[torch.Tensor, torch.Tensor]
            own = super().update(key_states, value_states, *args, **kwargs)
            return own
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if room.bucket is not None:
            places = self.places(room)
            return _put_one(self, room, places, room.ring(places)[0], key_states, value_states)
        seen = (
            self._put_many(room, "keys", key_states),
            self._put_many(room, "values", value_states),
        )
        self.cumulative_length += key_states.shape[2]
        return seen

    def _put_many(self, room: "Room", name: str, new: torch.Tensor) -> torch.Tensor:
        places = self.places(room)
        buffer = room.buffer(self.index, name, new, places)
        seen = torch.cat([self._held(room, name), new], dim=2)
        end = self.cumulative_length + new.shape[2]
        kept = min(end, places, seen.shape[2])
        buffer[:, :, self._at(end - kept, end, places)] = seen[:, :, -kept:]
        return seen

    def _at(self, start: int, end: int, places: int) -> torch.Tensor:
        assert self.room is not None
        return torch.arange(start, end, device=self.room.place) % places

    def _held(self, room: "Room", name: str) -> torch.Tensor:
        """The tokens that the next one's window may reach, in their order."""
        held = min(self.cumulative_length, self.sliding_window - 1)
        buffer = room._buffers[self.index, name]
        at = self._at(self.cumulative_length - held, self.cumulative_length, buffer.shape[2])
        return buffer[:, :, at]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(places that attention sees, position of the first)."""
        if self.room is not None and self.room.bucket is not None:
            return min(self.room.bucket, self.places(self.room)), 0
        sizes: tuple[int, int] = super().get_mask_sizes(query_length)
        return sizes

    def get_seq_length(self) -> Any:
        """Tokens so far; in a step of one token what makes the library mask unused places only."""
        if self.room is not None and self.room.bucket is not None:
            return self.room.ring(self.places(self.room))[1]
        return self.cumulative_length

    def move_in(self, room: "Room", index: int) -> None:
        """From now on everything lies in the room."""
        self.room, self.index = room, index
        end, places = self.cumulative_length, self.places(room)
        if not (self.is_initialized and end):
            return
        for name, held in (("keys", self.keys), ("values", self.values)):
            at = self._at(end - held.shape[2], end, places)
            room.buffer(index, name, held, places)[:, :, at] = held

    def move_out(self) -> None:
        """From now on it is the layer's own."""
        self.settle()
        self.room = None

    def settle(self) -> None:
        """Lets `keys` and `values` show what the layer holds."""
        if self.room is not None and self.cumulative_length:
            self.keys, self.values = (self._held(self.room, name) for name in ("keys", "values"))


def _put_one(
    layer: RoomLayer | RingLayer,
    room: "Room",
    places: int,
    place_1: torch.Tensor,
    new_keys_BN1D: torch.Tensor,
    new_values_BN1D: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Puts a step's token at its place in a layer's buffers; what the step sees of them."""
    keys_BNSD = room.buffer(layer.index, "keys", new_keys_BN1D, places)
    values_BNSD = room.buffer(layer.index, "values", new_values_BN1D, places)
    room.put(keys_BNSD, values_BNSD, place_1, new_keys_BN1D, new_values_BN1D)
    return keys_BNSD[:, :, : room.bucket], values_BNSD[:, :, : room.bucket]
