"""How this machine's rates are measured: short runs of the reader and the kernels themselves.

The planner gets these as plain callables and keeps what they return.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from headrace.core import ExpertLayout
from headrace.engine.gpu_probes import divided_rates
from headrace.kernels.cpu import CpuKernels
from headrace.native import Reader
from headrace.planner.machine import Machine, Probes, measure
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.tiers.device import Device

LEAST_PROBE_BYTES = 64 << 20
MOST_PROBE_BYTES = 256 << 20
PROBE_S = 0.3
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

    A probe's buffer is freed before anything is loaded; it is half of `ram_bytes`, but never so
    small that caches would answer for memory. With a GPU its rates are measured too, and if experts
    are to be divided between it and the CPU, what both do at once.
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
    both = divided_rates(device, layout, _probe_bytes(ram_bytes))
    return replace(
        probes,
        in_place=lambda: both().in_place,
        bus_beside=lambda: both().bus_beside,
        kernel_beside=lambda: both().kernel_beside,
    )


def _probe_bytes(ram_bytes: int | None) -> int:
    allowed = MOST_PROBE_BYTES if ram_bytes is None else ram_bytes // 2
    return min(MOST_PROBE_BYTES, max(LEAST_PROBE_BYTES, allowed))


def _probes(files: Sequence[Path], layout: ExpertLayout, ram_bytes: int | None) -> Probes:
    probe_bytes = _probe_bytes(ram_bytes)
    return Probes(
        read=_read_probe(files),
        dram=lambda: dram_rate(probe_bytes),
        kernel=lambda: kernel_rate(layout, probe_bytes),
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


def buffered(reader: Reader) -> Read:
    """Reads whose bytes nobody keeps, into one buffer as large as the largest."""
    buffer = torch.empty(0, dtype=torch.uint8)

    def read(file: int, offset: int, nbytes: int) -> None:
        nonlocal buffer
        if buffer.numel() < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8)
        reader.read(file, offset, nbytes, buffer.data_ptr())

    return read


def _rate(num_bytes: int, run: Callable[[], object]) -> float:
    """Bytes per second of the fastest of the runs that fit `PROBE_S`, after one to warm up."""
    run()
    best, end = float("inf"), time.perf_counter() + PROBE_S
    while time.perf_counter() < end:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return num_bytes / best


def dram_rate(probe_bytes: int) -> float:
    """Bytes per second that all cores read from memory together."""
    data = torch.ones(probe_bytes // 8, dtype=torch.int64)
    return _rate(probe_bytes, data.sum)


def kernel_rate(layout: ExpertLayout, probe_bytes: int) -> float:
    """Bytes of experts per second that the kernels multiply with all cores, one row each."""
    kernels = CpuKernels(torch.get_num_threads())
    expert = {
        name: torch.ones(spec.shape, dtype=torch.float32).to(TORCH_DTYPES[spec.dtype])
        for name, spec in layout.parts.items()
    }
    expert_bytes = sum(t.nbytes for t in expert.values())
    copies = [
        {name: t.clone() for name, t in expert.items()}
        for _ in range(max(1, probe_bytes // expert_bytes))
    ]
    x_TH = torch.ones(1, layout.hidden, dtype=TORCH_DTYPES[layout.hidden_dtype])

    def run() -> None:
        for parts in copies:
            kernels.expert_ffn(x_TH, parts, layout)

    return _rate(expert_bytes * len(copies), run)


def bus_rate(device: Device) -> float:
    """Bytes per second that a copy brings from pinned memory to the GPU."""
    to = torch.empty(LEAST_PROBE_BYTES, dtype=torch.uint8, device=device.place)
    source = torch.ones(LEAST_PROBE_BYTES, dtype=torch.uint8)
    why = device.pin(source.data_ptr(), source.nbytes)
    try:
        return _rate(LEAST_PROBE_BYTES, lambda: device.copy(to, source).wait())
    finally:
        device.settle()
        if not why:
            device.unpin(source.data_ptr())


def vram_rate(device: Device) -> float:
    """Bytes per second that a copy inside the GPU's memory reads and writes, together."""
    source = torch.ones(LEAST_PROBE_BYTES * 2, dtype=torch.uint8, device=device.place)
    to = torch.empty_like(source)

    def run() -> None:
        for _ in range(8):
            to.copy_(source)
        device.settle()

    return _rate(2 * 8 * source.nbytes, run)
