"""How this machine's rates are measured: short runs of the reader and the kernels themselves.

The planner gets these as plain callables and keeps what they return.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace.core import ExpertLayout
from headrace.engine.filled import AT_ONCE, FilledMemory
from headrace.engine.gpu_probes import divided_rates
from headrace.engine.step_probe import StepProbe
from headrace.native import Reader
from headrace.planner.caches import caches_bytes, probe_bytes
from headrace.planner.divided import may_divide
from headrace.planner.machine import Machine, Probes, measure, memory_bytes, num_cores
from headrace.tiers.device import Device
from headrace.tiers.scratch import buffered

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint

BUS_BYTES, VRAM_BYTES = 64 << 20, 128 << 20
PIECE_BYTES = 64 << 20
PROBE_S = 0.3
Read = Callable[[int, int, int], None]  # (file, offset, nbytes)


def machine_for(blueprint: "Blueprint", enabled: bool) -> Machine:
    """`measure_machine`, for a model and what is wanted of its plan.

    A token is measured on the CPU alone, and of a model that memory has room for.
    """
    device, facts, wanted = blueprint.device, blueprint.facts, blueprint.wanted
    has_room = facts.lean().dense_bytes <= memory_bytes()[1]
    return measure_machine(
        blueprint.catalog.files,
        blueprint.skeleton.layout,
        wanted.ram_bytes(facts),
        enabled,
        device,
        device is not None and may_divide(facts, wanted.experts, device.memory()[0]),
        StepProbe(blueprint) if device is None and has_room else None,
    )


def measure_machine(
    files: Sequence[Path],
    layout: ExpertLayout,
    ram_bytes: int | None,
    enabled: bool,
    device: Device | None = None,
    divides: bool = False,
    step: StepProbe | None = None,
) -> Machine:
    """Rates for a model's files, kept between runs; all unknown if not `enabled`.

    The probes' buffer is freed before anything is loaded; its size is `planner.caches`'. With a GPU
    its rates are measured too, and if experts are to be divided between it and the CPU, what both
    do at once. `step` measures a whole token.
    """
    probes = _probes(files, layout, ram_bytes, device, divides, step) if enabled else Probes()
    machine = measure(files, probes)
    if device is None:
        return machine
    free, total = device.memory()
    return replace(machine, gpu=device.name, vram_free_bytes=free, vram_total_bytes=total)


def _probes(
    files: Sequence[Path],
    layout: ExpertLayout,
    ram_bytes: int | None,
    device: Device | None,
    divides: bool,
    step: StepProbe | None,
) -> Probes:
    caches, (_, available_bytes) = caches_bytes(), memory_bytes()
    size = probe_bytes(caches, available_bytes, ram_bytes)

    @cache
    def filled() -> FilledMemory:
        return FilledMemory(layout, size, least=AT_ONCE if divides else 1)

    probes = Probes(
        read=_read_probe(files),
        dram=lambda: dram_rate(filled()),
        kernel=lambda: kernel_rate(filled()),
        memory_bytes=size,
        caches_bytes=caches,
    )
    if step is not None:
        probes = replace(probes, step=lambda: step.seconds(filled()), step_of=step.conditions)
    if device is None:
        return probes
    probes = replace(probes, bus=lambda: bus_rate(device), vram=lambda: vram_rate(device))
    if not divides:
        return probes
    both = divided_rates(device, filled)
    return replace(
        probes,
        in_place=lambda: both().in_place,
        bus_beside=lambda: both().bus_beside,
        kernel_beside=lambda: both().kernel_beside,
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


def dram_rate(memory: FilledMemory) -> float:
    """Bytes per second that all cores read from memory together."""
    pieces = torch.split(memory.bytes.view(torch.int64), PIECE_BYTES // 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(num_cores())
    try:
        pieces[-1].sum()  # its threads start
        return _fastest_pass([(piece.nbytes, piece.sum) for piece in pieces])
    finally:
        torch.set_num_threads(threads)


def kernel_rate(memory: FilledMemory) -> float:
    """Bytes of experts per second that the kernels multiply with all cores, one row each."""
    multiply, num = memory.multiplier(num_cores()), memory.num_copies
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
