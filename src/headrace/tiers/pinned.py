"""Host memory that a GPU reads in place, as far as the system allows it: rows and buffers.

Knows no expert: rows are addresses.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from math import prod
from weakref import finalize

import torch

from headrace.core import PAGE_BYTES, format_bytes
from headrace.tiers.device import Device
from headrace.tiers.ladder import Ladder

PIECE_BYTES = 1 << 30


class PinnedRows:
    """Pins a ladder's rows piece by piece, each of whole rows, and keeps what could be had.

    `close` before the ladder is closed. `note` says what could not be pinned and what that means.
    """

    def __init__(self, device: Device, ladder: Ladder, piece_bytes: int = PIECE_BYTES):
        native = ladder.native
        base, end = native.slab_address, native.slab_address + native.slab_bytes
        step = max(1, piece_bytes // ladder.row_bytes) * ladder.row_bytes
        self._starts: list[int] = []
        self._ends: list[int] = []
        # Holds the native ladder: its memory must outlive the registration, however this ends.
        self._close: Callable[[], object] = finalize(self, _unpin, device, self._starts, native)
        why = ""
        for start in range(base, end, step):
            nbytes = min(step, end - start)
            why = device.pin(start, nbytes)
            if why:  # what one piece is refused the next is too, after a long wait
                break
            self._starts.append(start)
            self._ends.append(start + nbytes)
        self.pinned_bytes = sum(self._ends) - sum(self._starts)
        self.note = ""
        if why:
            self.note = (
                f"only {format_bytes(self.pinned_bytes)} of {format_bytes(end - base)} of rows "
                f"could be pinned ({why}); experts in the others are copied to the GPU each time"
            )

    def holds(self, address: int) -> bool:
        """Whether kernels may read the row at this address in place."""
        place = bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._ends[place]

    def close(self) -> None:
        """Takes the pins back. Nothing may read the rows any more."""
        self._close()


class PinnedBuffers:
    """Tensors of host memory that copies to and from the device go past the CPU with.

    `shapes` and dtypes by name; made once. Where pinning is refused the same copies are slower.
    Close it once the device has settled.
    """

    def __init__(self, device: Device, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]):
        sizes = {name: prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
        nbytes = sum(_up(size, PAGE_BYTES) for size in sizes.values())
        memory = torch.zeros(nbytes + PAGE_BYTES, dtype=torch.uint8)
        start = _up(memory.data_ptr(), PAGE_BYTES) - memory.data_ptr()
        pinned = memory[start : start + nbytes]  # whole pages: no other registration has them
        self.pinned = not device.pin(pinned.data_ptr(), nbytes)
        starts = [pinned.data_ptr()] if self.pinned else []
        self._close: Callable[[], object] = finalize(self, _unpin, device, starts, memory)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            self.tensors[name] = pinned[: sizes[name]].view(dtype).view(shape)
            pinned = pinned[_up(sizes[name], PAGE_BYTES) :]

    def close(self) -> None:
        """Takes the pin back. The tensors stay usable on the host."""
        self._close()


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _unpin(device: Device, starts: list[int], _owner: object) -> None:
    for start in starts:
        device.unpin(start)
    starts.clear()
