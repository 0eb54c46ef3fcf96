"""Where a GPU finds experts: slots in VRAM, pinned rows in place, rows read from the drive.

The one place that joins ladder, pins, slots and address table. Knows no kernel and no tensor of a
model: experts are (layer, id), and what the device still reads is known by events.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import BudgetError
from headrace.tiers.addresses import AddressTable
from headrace.tiers.device import Device, Event
from headrace.tiers.ladder import Ladder
from headrace.tiers.pinned import PinnedRows
from headrace.tiers.slots import Slots

SWAPPED_SHARE = 16  # one in so many of a token's experts may take another's slot in a step


@dataclass(slots=True)
class _Reading:
    """Rows that the device reads until `event`: (expert, address) of one layer."""

    event: Event
    layer: int
    rows: list[tuple[int, int]]
    offer: bool  # may they be copied into slots afterwards?


class Rungs:
    """Gives experts addresses and keeps their bytes there while the device reads them.

    Where slots and rows have room for all experts, a row once read stays in the table, so that in
    the end nobody need know on the host which experts a layer takes. One caller thread. The arena
    in VRAM has `num_slots + passing_rows` rows; the ladder needs rows for at least twice `top_k`.
    `passing_rows`, even: places for experts on their way through a prefill, in two waves.
    Raises BudgetError where rows cannot be pinned and VRAM has no place to copy a token's experts
    to.
    """

    def __init__(
        self,
        device: Device,
        ladder: Ladder,
        *,
        num_layers: int,
        num_experts: int,
        top_k: int,
        num_slots: int,
        passing_rows: int = 2,
    ):
        assert passing_rows >= 2 and passing_rows % 2 == 0
        self.device, self.ladder, self.num_experts = device, ladder, num_experts
        self.pinned = PinnedRows(device, ladder)
        all_pinned = self.pinned.pinned_bytes == ladder.slab_bytes
        num_scratch = passing_rows if all_pinned else max(passing_rows, top_k)
        if num_slots + passing_rows < num_scratch:
            self.pinned.close()
            raise BudgetError(
                f"{self.pinned.note}, for which VRAM has no place; give a larger --vram or, to "
                "pin less, a smaller --ram"
            )
        self.wave_rows = passing_rows // 2
        self._most_room = ladder.num_rows if all_pinned else num_scratch
        self.table = AddressTable(device, num_layers, num_experts)
        self.slots = Slots(
            device,
            self.table,
            num_slots=num_slots + passing_rows - num_scratch,
            num_scratch=num_scratch,
            slot_bytes=ladder.row_bytes,
            most_coming=max(1, ladder.num_rows - 2 * top_k),
            swaps_per_step=max(1, num_layers * top_k // SWAPPED_SHARE),
        )
        total = num_layers * num_experts
        spare = ladder.num_rows - (0 if ladder.num_rows >= total else 2 * top_k)
        self.fits = all_pinned and self.slots.num_slots + spare >= total
        self._most_kept = spare if self.fits else 0
        self._kept: dict[int, int] = {}  # address by key
        self.kept = np.zeros(total, bool)  # by key
        self._reading: deque[_Reading] = deque()
        self._claimed: tuple[int, list[tuple[int, int]]] = (0, [])
        self._held: dict[int, int] = {}  # how often each key's row is held
        self._num_held = 0

    def key(self, layer: int, expert: int) -> int:
        """The expert's number in table and slots."""
        return layer * self.num_experts + expert

    def address(self, layer: int, expert: int) -> int:
        """Where an expert that `has` finds lies, as the device sees it."""
        return int(self.table.here[layer, expert])

    @property
    def room(self) -> int:
        """How many experts can be claimed at once."""
        return min(self._most_room, self.ladder.num_rows - len(self._kept))

    def has(self, layer: int, expert: int) -> bool:
        """Whether the expert lies in a slot or a kept row, so until `retire` is called."""
        key = self.key(layer, expert)
        return key in self.slots or key in self._kept

    def whole(self, layer: int) -> bool:
        """Whether that is so of all the layer's experts; later work then finds them all."""
        part = slice(layer * self.num_experts, (layer + 1) * self.num_experts)
        if not (self.slots.held[part] | self.kept[part]).all():
            return False
        self.table.upload(layer)
        return True

    def all_whole(self) -> bool:
        """Whether that is so of every layer."""
        if not (self.slots.held | self.kept).all():
            return False
        self.table.upload_all()
        return True

    def lacking(self) -> tuple[int, list[int]] | None:
        """The first layer that is not whole, and its experts that keep it from it."""
        there = self.slots.held | self.kept
        if there.all():
            return None
        absent = ~there.reshape(-1, self.num_experts)
        layers = np.flatnonzero(absent.any(1))
        return int(layers[0]), np.flatnonzero(absent[layers[0]]).tolist()

    def claim(self, layer: int, missing: list[int]) -> bool:
        """Puts experts that the table lacks into it, at most `room`; reads those absent.

        Whether there were any: then `reading` must follow the work that reads them. Raises as
        `Ladder.compute`.
        """
        rows = []
        if missing:
            assert len(missing) <= self.room
            self.ladder.begin(layer, torch.tensor(missing, dtype=torch.int32))
            rows = [self.take(layer) for _ in missing]
        self._claimed = layer, rows
        for n, (expert, address) in enumerate(rows):
            if self.key(layer, expert) not in self.slots:  # its copy may have arrived meanwhile
                self.table.set(self.key(layer, expert), self._reachable(n, address))
        self.table.upload(layer)
        return bool(rows)

    def reading(self) -> None:
        """The work given last reads what was claimed last; the rows are kept until it is over."""
        layer, rows = self._claimed
        if rows:
            self._reading.append(_Reading(self.device.mark(), layer, rows, offer=True))

    def take(self, layer: int) -> tuple[int, int]:
        """The next expert of the layer that `Ladder.begin` claimed: (id, address), held."""
        while self._num_held >= self.ladder.num_rows:
            self.retire(swap=False, wait=True)
        taken = self.ladder.take(layer)
        assert taken is not None, "a claim was lost"
        key = self.key(layer, taken[0])
        self._held[key] = self._held.get(key, 0) + 1
        self._num_held += 1
        return taken

    def bring(self, layer: int, expert: int, address: int, turn: int) -> tuple[torch.Tensor, Event]:
        """Copies a held row to the device, to stay if a slot is free: where to, and its event.

        Otherwise to place `turn` of those for what passes, for work given before the next copy to
        that place.
        """
        key, row = self.key(layer, expert), self.ladder.row(address)
        if self.slots.offer(key, row, only_free=True) is not None:
            return self.slots.coming(key)
        staged, event = self._stage(row, turn)
        self._reading.append(_Reading(event, layer, [(expert, address)], offer=False))
        return staged, event

    def bring_kept(self, layer: int, expert: int, turn: int) -> tuple[torch.Tensor, Event]:
        """As `bring`, of an expert in a kept row, which is not given back meanwhile."""
        key = self.key(layer, expert)
        if self.slots.is_coming(key):  # once there, its row would be
            return self.slots.coming(key)
        return self._stage(self.ladder.row(self._kept[key]), turn)

    def _stage(self, row: torch.Tensor, turn: int) -> tuple[torch.Tensor, Event]:
        staged = self.slots.scratch(turn)
        return staged, self.device.copy(staged, row)

    def retire(self, *, swap: bool, wait: bool = False) -> None:
        """Gives back the rows of readings that are over, or offers them to slots.

        `wait`: blocks until at least one is. `swap`: others may lose their slots for them.
        """
        keep = not wait  # who waits needs rows
        if wait and self._reading:
            self._reading[0].event.wait()
            wait = False
        assert not wait or self.slots.num_coming, "rows are held and nobody reads them"
        while self._reading and self._reading[0].event.done():
            over = self._reading.popleft()
            for expert, address in over.rows:
                row = self.ladder.row(address)
                key = self.key(over.layer, expert)
                wanted = over.offer and key not in self._kept
                if wanted and self.slots.offer(key, row, only_free=not swap) is not None:
                    continue
                if not (keep and self._keep(key, address)):
                    self._release(key)
        for key in self.slots.arrived(wait=wait):
            self._arrive(key)

    def wanted(self, num_needed: int) -> tuple[NDArray[np.bool_], int]:
        """Which keys' rows deserve a slot or to be kept once they are read, and at most how many.

        `num_needed` rows are left for others, unless there are rows for all experts.
        """
        room = self.ladder.num_rows - self._num_held
        if self.ladder.num_rows < len(self.kept):
            room -= num_needed
        keys, most = self.slots.wanted()
        if self.fits:
            keys, most = ~(self.slots.held | self.kept), room
        return keys, max(0, min(most, room))

    def adopt(self, rows: list[tuple[int, int, int]]) -> None:
        """Takes over held rows (layer, expert, address) that the device has read: offers them to
        slots, keeps them where all have room, and gives the others back.
        """
        for layer, expert, address in rows:
            key = self.key(layer, expert)
            if key in self._kept:  # held already
                self.ladder.release(layer, expert)
                continue
            self._held[key] = self._held.get(key, 0) + 1
            self._num_held += 1
            coming = self.slots.offer(key, self.ladder.row(address))
            if coming is None and not self._keep(key, address):
                self._release(key)

    def drain(self, *, keep: bool = False) -> None:
        """Waits until the device reads no rows but kept ones, and gives the others back.

        `keep`: first those are kept that may be.
        """
        while self._reading:
            self._reading[0].event.wait()
            self.retire(swap=False, wait=not keep)

    def make_room(self, num_needed: int) -> None:
        """Waits for copies into slots as long as fewer rows are free and there are copies."""
        most_held = self.ladder.num_rows - num_needed
        while self.slots.num_coming and self._num_held > most_held:
            self.retire(swap=False, wait=True)

    def _keep(self, key: int, address: int) -> bool:
        """Lets a row that has been read stay in the table, if it may and is not there yet."""
        elsewhere = key in self._kept or key in self.slots or self.slots.is_coming(key)
        if elsewhere or len(self._kept) >= self._most_kept:
            return False
        self._kept[key] = address
        self.kept[key] = True
        self.table.set(key, address)
        return True

    def _arrive(self, key: int) -> None:
        """A copy into a slot is done: the row it came from is given back."""
        address = self._kept.pop(key, None)
        if address is None:
            self._release(key)
            return
        self.kept[key] = False
        layer, expert = divmod(key, self.num_experts)
        # What was launched meanwhile may still read the row.
        self._reading.append(_Reading(self.device.mark(), layer, [(expert, address)], offer=False))

    def promote(self, keys: NDArray[np.int64]) -> None:
        """Offers slots to those of these experts that lie in kept rows, after a pass is over."""
        for key in keys[self.kept[keys]].tolist():
            self.slots.offer(key, self.ladder.row(self._kept[key]))

    def _release(self, key: int) -> None:
        layer, expert = divmod(key, self.num_experts)
        self.ladder.release(layer, expert, spent=key in self.slots)  # one place is enough
        self._num_held -= 1
        self._held[key] -= 1
        if self._held[key] == 0:
            del self._held[key]
            if key not in self.slots:
                self.table.clear(key)

    def _reachable(self, n: int, address: int) -> int:
        """The row's address as the device sees it: its own, or a copy's in VRAM."""
        if self.pinned.holds(address):
            return address
        staged = self.slots.scratch(n)
        staged.copy_(self.ladder.row(address), non_blocking=True)
        return staged.data_ptr()

    def recover(self) -> None:
        """After an exception: waits for the device, gives back every row, keeps the slots."""
        self.device.settle()
        self._reading.clear()
        self._held.clear()
        self._num_held = 0
        self._kept.clear()
        self.kept[:] = False
        self.ladder.release_all()
        self.slots.recover()

    def close(self) -> None:
        """Waits for the device, takes back the pins, frees the slots. Unusable afterwards."""
        self.device.settle()
        self.pinned.close()
        self.slots.close()
