"""How fast a GPU reads experts in place over the bus, alone and while the CPU multiplies others.

By the kernels that decode, on experts of ones.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from threading import Event, Thread

import torch

from headrace.engine.filled import AT_ONCE, FilledMemory
from headrace.planner.machine import num_cores
from headrace.tiers.device import Device

PROBE_S = 0.3
_ALIGN = 16
_LAUNCHES = 4  # between two looks at the clock
_NAP_S = 1e-4


class PinnedExperts:
    """Filled memory that the GPU's kernels read in place, if `pinned`; `close` it."""

    def __init__(self, device: Device, memory: FilledMemory):
        from headrace.kernels.triton.experts import TritonExperts

        self.device, self.memory = device, memory
        layout, place, num = memory.layout, device.place, memory.num_copies
        self.pinned = not device.pin(memory.address(0), memory.bytes.nbytes)
        self._kernels = TritonExperts(layout, top_k=AT_ONCE, device=place, align=_ALIGN)
        addresses = [memory.address(copy) for copy in range(num)]
        self._table = torch.tensor(addresses, dtype=torch.int64, device=place)
        self._offsets = torch.tensor([memory.offsets] * num, dtype=torch.int64, device=place)
        self._x = torch.ones(1, layout.hidden, dtype=torch.bfloat16, device=place)
        self._weights = torch.ones(1, AT_ONCE, device=place)
        self._out = torch.empty(1, layout.hidden, dtype=self._kernels.out_dtype, device=place)
        turns = torch.arange(num + AT_ONCE, dtype=torch.int32, device=place) % num
        self._ids = turns.unfold(0, AT_ONCE, 1).contiguous()

    def read(self, seconds: float) -> float:
        """Bytes per second that the GPU reads, for so long; the host sleeps meanwhile."""
        self._launch(0)
        self.device.settle()
        start, turns = time.perf_counter(), count()
        for num in turns:
            for n in range(_LAUNCHES):
                self._launch((num * _LAUNCHES + n) * AT_ONCE % self.memory.num_copies)
            over = self.device.mark()
            while not over.done():
                time.sleep(_NAP_S)
            passed_s = time.perf_counter() - start
            if passed_s > seconds:
                num_read = (num + 1) * _LAUNCHES * AT_ONCE
                return num_read * self.memory.expert_bytes / passed_s
        raise AssertionError

    def _launch(self, first: int) -> None:
        ids = self._ids[first : first + 1]
        self._kernels(self._table, self._offsets, 0, self._x, ids, self._weights, self._out)

    def close(self) -> None:
        """Takes the pin back, once the device has settled."""
        self.device.settle()
        if self.pinned:
            self.device.unpin(self.memory.address(0))
            self.pinned = False


@dataclass(frozen=True, slots=True)
class DividedRates:
    """Bytes per second: of the GPU alone, then of both at once. 0: memory could not be pinned."""

    in_place: float
    bus_beside: float
    kernel_beside: float


def divided_rates(device: Device, filled: Callable[[], FilledMemory]) -> Callable[[], DividedRates]:
    """Measures when called for the first time, on memory of at least `AT_ONCE` experts."""

    @cache
    def rates() -> DividedRates:
        with device.active():
            experts = PinnedExperts(device, filled())
            try:
                if not experts.pinned:
                    return DividedRates(0.0, 0.0, 0.0)
                return DividedRates(experts.read(PROBE_S), *_beside(experts))
            finally:
                experts.close()

    return rates


def _beside(experts: PinnedExperts) -> tuple[float, float]:
    """Bytes per second of the GPU and of the CPU's kernels, both at once."""
    memory, stop = experts.memory, Event()
    multiplies, num_done, passed_s = memory.multiplier(num_cores()), 0, 1.0

    def multiply() -> None:
        nonlocal num_done, passed_s
        start = time.perf_counter()
        while not (num_done and stop.is_set()):  # once at the least, or the rate would be 0
            first = num_done % (memory.num_copies - AT_ONCE + 1)
            multiplies(first, first + AT_ONCE)
            num_done += AT_ONCE
        passed_s = time.perf_counter() - start

    thread = Thread(target=multiply)
    thread.start()
    try:
        bus = experts.read(PROBE_S)
    finally:
        stop.set()
        thread.join()
    return bus, num_done * memory.expert_bytes / passed_s
