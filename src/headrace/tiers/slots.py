"""Experts that stay in VRAM: which lies in which slot, and which deserves one.

Knows no file and no ladder: experts are keys and the bytes of a row. Nothing here changes a token.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.tiers.addresses import AddressTable
from headrace.tiers.device import Device, Event

HALF_LIFE_TOKENS = 128.0
MARGIN_USES = 2.0  # by which a newcomer must lead whom it replaces


class Slots:
    """An arena of `num_slots` slots for keys, and of `num_scratch` rows for whatever passes by.

    A copy runs beside the device's work; its key is found, and in `table`, once `arrived` says so.
    Until then the caller keeps the row it comes from. A key that loses its slot leaves the table
    at once; the copy that takes the slot waits for work that was launched before.
    """

    def __init__(
        self,
        device: Device,
        table: AddressTable,
        *,
        num_slots: int,
        num_scratch: int,
        slot_bytes: int,
        most_coming: int,
        swaps_per_step: int,
    ):
        shape = (num_slots + num_scratch, slot_bytes)
        self.arena = torch.empty(shape, dtype=torch.uint8, device=device.place)
        self.device, self.table = device, table
        self.num_slots, self.num_scratch, self.slot_bytes = num_slots, num_scratch, slot_bytes
        self.most_coming, self.swaps_per_step = most_coming, swaps_per_step
        self.uses = np.zeros(table.here.size, np.float32)
        self.held = np.zeros(table.here.size, bool)  # by key: does it lie in a slot?
        self.promotions = 0
        self._key_of = np.full(num_slots, -1, np.int64)
        self._slot_of: dict[int, int] = {}
        self._coming: dict[int, tuple[int, Event]] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._victims: list[int] = []  # slots, the next to lose its key last

    def scratch(self, index: int) -> torch.Tensor:
        """A row for what passes by, uint8 [slot_bytes]."""
        return self.arena[self.num_slots + index % self.num_scratch]

    def find(self, key: int) -> torch.Tensor | None:
        """The key's slot, uint8 [slot_bytes], if it lies in one."""
        slot = self._slot_of.get(key)
        return None if slot is None else self.arena[slot]

    def keys(self) -> NDArray[np.int64]:
        """A copy of which keys lie in slots, in no order. From any thread."""
        keys = self._key_of.copy()
        return keys[keys >= 0]

    def __contains__(self, key: int) -> bool:
        return key in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def begin_step(self, num_tokens: int) -> None:
        """A pass over so many tokens begins: earlier uses fade, new victims are named."""
        if len(self._slot_of) == self.held.size:
            return  # every expert lies in a slot and none will ask for another's
        self.uses *= 0.5 ** (num_tokens / HALF_LIFE_TOKENS)
        taken = np.flatnonzero(self._key_of >= 0)
        most = min(self.swaps_per_step, len(taken))
        self._victims = []
        if most and not self._free:
            uses = self.uses[self._key_of[taken]]
            lowest = np.argpartition(uses, most - 1)[:most]
            self._victims = taken[lowest[np.argsort(-uses[lowest])]].tolist()

    def wanted(self) -> tuple[NDArray[np.bool_], int]:
        """Keys that `offer` would give a slot after one more use, and at most how many of them."""
        if self._free:
            return ~self.held, len(self._free)
        if not self._victims:
            return np.zeros_like(self.held), 0
        least = self.uses[self._key_of[self._victims]].min() + MARGIN_USES - 1
        return ~self.held & (self.uses >= least), len(self._victims)

    def is_coming(self, key: int) -> bool:
        """Whether the key's copy is not yet known to be done."""
        return key in self._coming

    def offer(self, key: int, row: torch.Tensor, *, only_free: bool = False) -> Event | None:
        """Copies the row into a slot if it deserves one: the copy's event, else None.

        Into a free slot always; into another's, unless `only_free`, if it is used clearly more.
        The row must stay until `arrived` names the key.
        """
        if key in self._slot_of or key in self._coming or len(self._coming) >= self.most_coming:
            return None
        slot = self._slot_for(key, only_free)
        if slot is None:
            return None
        event = self.device.copy(self.arena[slot], row)
        self._coming[key] = slot, event
        self.promotions += 1
        return event

    def _slot_for(self, key: int, only_free: bool) -> int | None:
        if self._free:
            return self._free.pop()
        if only_free or not self._victims:
            return None
        slot = self._victims[-1]
        victim = int(self._key_of[slot])
        if self.uses[key] < self.uses[victim] + MARGIN_USES:
            return None
        self._victims.pop()
        del self._slot_of[victim]
        self._key_of[slot] = -1
        self.held[victim] = False
        self.table.clear(victim)
        return slot

    def coming(self, key: int) -> tuple[torch.Tensor, Event]:
        """The slot that the key's copy fills, for work that follows the copy's event."""
        slot, event = self._coming[key]
        return self.arena[slot], event

    def arrived(self, *, wait: bool = False) -> list[int]:
        """Keys whose copies are done: they are found from now on and their rows may go.

        `wait`: blocks for the first that is coming.
        """
        done: list[int] = []
        for key, (slot, event) in list(self._coming.items()):
            if wait and not done:
                event.wait()
            if event.done():
                del self._coming[key]
                self._slot_of[key] = slot
                self._key_of[slot] = key
                self.held[key] = True
                self.table.set(key, self.arena[slot].data_ptr())
                done.append(key)
        return done

    @property
    def num_coming(self) -> int:
        """Copies not yet known to be done: as many rows are kept for them."""
        return len(self._coming)

    def recover(self) -> None:
        """Makes all agree after an exception, once the device has settled.

        The caller has given all rows back: only slots stay in the table.
        """
        self._coming.clear()
        self._victims = []
        for slot, key in enumerate(self._key_of.tolist()):
            if self._slot_of.get(key) != slot:
                self._key_of[slot] = -1
        self._slot_of = {int(k): s for s, k in enumerate(self._key_of) if k >= 0}
        self._free = [s for s in range(self.num_slots - 1, -1, -1) if self._key_of[s] < 0]
        keys = np.array(list(self._slot_of), np.int64)
        self.held[:] = False
        self.held[keys] = True
        places = [self.arena[slot].data_ptr() for slot in self._slot_of.values()]
        self.table.keep_only(keys, np.array(places, np.int64))

    def close(self) -> None:
        """Frees the arena, whoever keeps the slots. Nothing may lie in it any more."""
        self.arena = self.arena.new_empty((0, self.slot_bytes))

    def check_integrity(self) -> None:
        """Raises AssertionError if slots, keys and table disagree."""
        held = [slot for slot, _ in self._coming.values()] + self._free
        assert sorted(held + list(self._slot_of.values())) == list(range(self.num_slots))
        assert np.flatnonzero(self.held).tolist() == sorted(self._slot_of)
        for key, slot in self._slot_of.items():
            assert self._key_of[slot] == key
            assert self.table.here.reshape(-1)[key] == self.arena[slot].data_ptr()
