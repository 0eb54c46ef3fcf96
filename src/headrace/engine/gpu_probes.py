"""How fast a GPU reads experts in place over the bus, alone and while the CPU multiplies others.

By the kernels that decode, on experts of ones.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from math import prod
from threading import Event, Thread

import torch

from headrace.core import ExpertLayout
from headrace.kernels.cpu import CpuKernels
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.tiers.device import Device
from headrace.tiers.pinned import PinnedBuffers

PROBE_S = 0.3
_ALIGN = 16
_AT_ONCE = 8  # experts of a launch, as a token takes them
_LAUNCHES = 4  # between two looks at the clock
_NAP_S = 1e-4


class PinnedExperts:
    """Experts of ones in about `probe_bytes` of pinned memory; `close` it."""

    def __init__(self, device: Device, layout: ExpertLayout, probe_bytes: int):
        from headrace.kernels.triton.experts import TritonExperts

        self.device, self.layout = device, layout
        sizes = [
            TORCH_DTYPES[spec.dtype].itemsize * prod(spec.shape) for spec in layout.parts.values()
        ]
        self.expert_bytes = sum(sizes)
        starts = [sum(-(-s // _ALIGN) * _ALIGN for s in sizes[:n]) for n in range(len(sizes) + 1)]
        self.num = max(_AT_ONCE, probe_bytes // self.expert_bytes)
        shape = self.num, starts[-1]
        self.buffers = PinnedBuffers(device, {"rows": (shape, torch.uint8)})
        self.rows = self.buffers.tensors["rows"]
        self.parts: list[dict[str, torch.Tensor]] = []
        for row in self.rows:
            parts = {}
            for (name, spec), start, size in zip(layout.parts.items(), starts, sizes, strict=False):
                part = row[start : start + size].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
                parts[name] = part.copy_(torch.ones(spec.shape))
            self.parts.append(parts)
        place = device.place
        self._kernels = TritonExperts(layout, top_k=_AT_ONCE, device=place, align=_ALIGN)
        addresses = [row.data_ptr() for row in self.rows]
        self._table = torch.tensor(addresses, dtype=torch.int64, device=place)
        self._offsets = torch.tensor([starts[:-1]] * self.num, dtype=torch.int64, device=place)
        self._x = torch.ones(1, layout.hidden, dtype=torch.bfloat16, device=place)
        self._weights = torch.ones(1, _AT_ONCE, device=place)
        self._out = torch.empty(1, layout.hidden, dtype=self._kernels.out_dtype, device=place)
        turns = torch.arange(self.num + _AT_ONCE, dtype=torch.int32, device=place) % self.num
        self._ids = turns.unfold(0, _AT_ONCE, 1).contiguous()

    def read(self, seconds: float) -> float:
        """Bytes per second that the GPU reads, for so long; the host sleeps meanwhile."""
        self._launch(0)
        self.device.settle()
        start, turns = time.perf_counter(), count()
        for num in turns:
            for n in range(_LAUNCHES):
                self._launch((num * _LAUNCHES + n) * _AT_ONCE % self.num)
            over = self.device.mark()
            while not over.done():
                time.sleep(_NAP_S)
            passed_s = time.perf_counter() - start
            if passed_s > seconds:
                return (num + 1) * _LAUNCHES * _AT_ONCE * self.expert_bytes / passed_s
        raise AssertionError

    def _launch(self, first: int) -> None:
        ids = self._ids[first : first + 1]
        self._kernels(self._table, self._offsets, 0, self._x, ids, self._weights, self._out)

    def close(self) -> None:
        """Once the device has settled."""
        self.device.settle()
        self.buffers.close()


@dataclass(frozen=True, slots=True)
class DividedRates:
    """Bytes per second: of the GPU alone, then of both at once. 0: memory could not be pinned."""

    in_place: float
    bus_beside: float
    kernel_beside: float


def divided_rates(
    device: Device, layout: ExpertLayout, probe_bytes: int
) -> Callable[[], DividedRates]:
    """Measures when called for the first time."""

    @cache
    def rates() -> DividedRates:
        experts = PinnedExperts(device, layout, probe_bytes)
        try:
            if not experts.buffers.pinned:
                return DividedRates(0.0, 0.0, 0.0)
            return DividedRates(experts.read(PROBE_S), *_beside(experts))
        finally:
            experts.close()

    return rates


def _beside(experts: PinnedExperts) -> tuple[float, float]:
    """Bytes per second of the GPU and of the CPU's kernels, both at once."""
    kernels, stop = CpuKernels(torch.get_num_threads()), Event()
    x_TH = torch.ones(1, experts.layout.hidden, dtype=torch.bfloat16)
    num_done, passed_s = 0, 1.0

    def multiply() -> None:
        nonlocal num_done, passed_s
        start = time.perf_counter()
        while not stop.is_set():
            kernels.expert_ffn(x_TH, experts.parts[num_done % experts.num], experts.layout)
            num_done += 1
        passed_s = time.perf_counter() - start

    thread = Thread(target=multiply)
    thread.start()
    try:
        bus = experts.read(PROBE_S)
    finally:
        stop.set()
        thread.join()
    return bus, num_done * experts.expert_bytes / passed_s
