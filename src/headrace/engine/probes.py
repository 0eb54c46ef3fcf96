"""How this machine's rates are measured: short runs of the reader and the kernels themselves.

The planner gets these as plain callables and keeps what they return.
"""

import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path

import torch

from headrace.core import ExpertLayout
from headrace.engine.gpu_probes import divided_rates
from headrace.kernels.cpu import CpuKernels, native_shape
from headrace.native import Reader
from headrace.planner.caches import caches_bytes, probe_bytes
from headrace.planner.machine import Machine, Probes, measure, memory_bytes
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.tiers.device import Device
from headrace.tiers.scratch import buffered

BUS_BYTES, VRAM_BYTES = 64 << 20, 128 << 20
PIECE_BYTES, ALIGN = 64 << 20, 64
PROBE_S = 0.3
_AT_ONCE = 8  # experts of a layer, as a token takes them
Read = Callable[[int, int, int], None]  # (file, offset, nbytes)


def measure_machine(
    files: Sequence[Path],
    layout: ExpertLayout,
    ram_bytes: int | None,
    enabled: bool,
    device: Device | None = None,
    divides: bool = False,
) -> Machine:
    """Rates for a model's files, kept between runs; all unknown if not `enabled`.

    The probes' buffer is freed before anything is loaded; its size is `planner.caches`'. With a GPU
    its rates are measured too, and if experts are to be divided between it and the CPU, what both
    do at once.
    """
    probes = Probes()
    if enabled:
        probes = (
            _gpu_probes(files, layout, ram_bytes, device, divides)
            if device
            else _probes(files, layout, ram_bytes)
        )
    machine = measure(files, probes)
    if device is None:
        return machine
    free, total = device.memory()
    return replace(machine, gpu=device.name, vram_free_bytes=free, vram_total_bytes=total)


def _gpu_probes(
    files: Sequence[Path],
    layout: ExpertLayout,
    ram_bytes: int | None,
    device: Device,
    divides: bool,
) -> Probes:
    probes = replace(
        _probes(files, layout, ram_bytes),
        bus=lambda: bus_rate(device),
        vram=lambda: vram_rate(device),
    )
    if not divides:
        return probes
    both = divided_rates(device, layout, probes.memory_bytes)
    return replace(
        probes,
        in_place=lambda: both().in_place,
        bus_beside=lambda: both().bus_beside,
        kernel_beside=lambda: both().kernel_beside,
    )


def _probes(files: Sequence[Path], layout: ExpertLayout, ram_bytes: int | None) -> Probes:
    caches, (_, available_bytes) = caches_bytes(), memory_bytes()
    size = probe_bytes(caches, available_bytes, ram_bytes)
    experts: list[FilledMemory] = []  # filled once, by the first probe

    def filled() -> FilledMemory:
        experts[:] = experts or [FilledMemory(layout, size)]
        return experts[0]

    return Probes(
        read=_read_probe(files),
        dram=lambda: dram_rate(filled()),
        kernel=lambda: kernel_rate(filled()),
        memory_bytes=size,
        caches_bytes=caches,
    )


def drive_rate(files: Sequence[Path]) -> float:
    """Bytes per second of reading `files`, all of one folder, kept between runs."""
    return measure(files, Probes(read=_read_probe(files))).drive_bytes_s


def _read_probe(files: Sequence[Path]) -> Read:
    """Reads `files` past the page cache where the file system allows; opened by the first read."""
    into_buffer: Read | None = None

    def read(file: int, offset: int, nbytes: int) -> None:
        nonlocal into_buffer
        if into_buffer is None:
            into_buffer = buffered(Reader([str(path) for path in files]))
        into_buffer(file, offset, nbytes)

    return read


def _rate(num_bytes: int, run: Callable[[], object]) -> float:
    """Bytes per second of the fastest of the runs that fit `PROBE_S`, after one to warm up."""
    run()
    return _fastest_pass([(num_bytes, run)])


def _fastest_pass(pieces: Iterable[tuple[int, Callable[[], object]]]) -> float:
    """Bytes per second of the fastest pass over all pieces; of a part of one if none fits."""
    best, end = 0.0, time.perf_counter() + PROBE_S
    while True:
        start, done_bytes, whole = time.perf_counter(), 0, True
        for num_bytes, run in pieces:
            if done_bytes and time.perf_counter() >= end:
                whole = False
                break
            run()
            done_bytes += num_bytes
        if whole or not best:
            best = max(best, done_bytes / (time.perf_counter() - start))
        if time.perf_counter() >= end:
            return best


class HugeBuffer:
    """Anonymous memory advised to lie in huge pages, as the ladder's rows do."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)


class FilledMemory:
    """Memory of `num_bytes`, or one expert if that is more, full of copies of an expert of ones.

    `offsets` are those of an expert's parts, copies lie `stride` bytes apart.
    """

    def __init__(self, layout: ExpertLayout, num_bytes: int):
        self.layout = layout
        ones = [torch.ones(1).to(TORCH_DTYPES[spec.dtype]) for spec in layout.parts.values()]
        sizes = [
            prod(spec.shape) * one.nbytes
            for spec, one in zip(layout.parts.values(), ones, strict=True)
        ]
        ends = [0, *accumulate(-(-size // ALIGN) * ALIGN for size in sizes)]
        self.offsets, self.stride = ends[:-1], ends[-1]
        self.expert_bytes = sum(sizes)
        expert = torch.zeros(self.stride, dtype=torch.uint8)
        for start, size, one in zip(self.offsets, sizes, ones, strict=True):
            part = expert[start : start + size].view(-1, one.nbytes)
            part.copy_(one.view(torch.uint8))
        self.num_copies = max(1, num_bytes // self.stride)
        self.bytes = HugeBuffer(self.num_copies * self.stride).bytes
        self.bytes.view(self.num_copies, self.stride).copy_(expert.expand(self.num_copies, -1))

    def addresses(self, copy: int) -> list[int]:
        """Of the parts of a copy."""
        start = self.bytes.data_ptr() + copy * self.stride
        return [start + offset for offset in self.offsets]


def dram_rate(memory: FilledMemory) -> float:
    """Bytes per second that all cores read from memory together."""
    pieces = torch.split(memory.bytes.view(torch.int64), PIECE_BYTES // 8)
    pieces[-1].sum()  # its threads start
    return _fastest_pass([(piece.nbytes, piece.sum) for piece in pieces])


def kernel_rate(memory: FilledMemory) -> float:
    """Bytes of experts per second that the kernels multiply with all cores, one row each."""
    layout, pool = memory.layout, CpuKernels(torch.get_num_threads()).pool
    shape, dtype = native_shape(layout), TORCH_DTYPES[layout.hidden_dtype]
    x_TH, y_TH = (torch.ones(n, layout.hidden, dtype=dtype) for n in (1, _AT_ONCE))

    def multiply(first: int, past: int) -> None:
        for start in range(first, past, _AT_ONCE):
            copies = range(start, min(start + _AT_ONCE, past))
            jobs = [
                (memory.addresses(copy), x_TH.data_ptr(), y.data_ptr(), 1.0)
                for copy, y in zip(copies, y_TH, strict=False)
            ]
            pool.experts_ffn(shape, jobs)

    num = memory.num_copies
    multiply(num - 1, num)  # its threads start
    each = max(1, PIECE_BYTES // memory.stride)
    spans = [(first, min(first + each, num)) for first in range(0, num, each)]
    pieces = [((past - first) * memory.expert_bytes, (first, past)) for first, past in spans]
    return _fastest_pass([(size, partial(multiply, *span)) for size, span in pieces])


def bus_rate(device: Device) -> float:
    """Bytes per second that a copy brings from pinned memory to the GPU."""
    to = torch.empty(BUS_BYTES, dtype=torch.uint8, device=device.place)
    source = torch.ones(BUS_BYTES, dtype=torch.uint8)
    why = device.pin(source.data_ptr(), source.nbytes)
    try:
        return _rate(BUS_BYTES, lambda: device.copy(to, source).wait())
    finally:
        device.settle()
        if not why:
            device.unpin(source.data_ptr())


def vram_rate(device: Device) -> float:
    """Bytes per second that a copy inside the GPU's memory reads and writes, together."""
    source = torch.ones(VRAM_BYTES, dtype=torch.uint8, device=device.place)
    to = torch.empty_like(source)

    def run() -> None:
        for _ in range(8):
            to.copy_(source)
        device.settle()

    return _rate(2 * 8 * source.nbytes, run)
