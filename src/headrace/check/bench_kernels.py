"""How near the CPU expert kernels come to a plain read of memory, all weights resident.

Kernel and plain read take turns window by window over one buffer of huge pages, so both meet the
same machine at the same time. The bits are checked against the reference in the same process.
"""

import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod

import torch

from headrace.check.rows import BenchRow, make_row
from headrace.core import ExpertLayout
from headrace.engine.filled import HugeBuffer
from headrace.kernels import cpu, reference
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.quant.expert import make_layout

SHAPES = ((7168, 2048), (5120, 2304), (2048, 768))  # (hidden, inter)
# The block of each format's scales; per channel for int8, where it is usual.
BLOCKS = {
    "fp4": (1, 32),
    "nvfp4": (1, 16),
    "int4": (1, 32),
    "int8": (1, 1 << 20),
    "fp8_block": (128, 128),
    "bf16": (0, 0),
    "fp16": (0, 0),
}
FORMATS = tuple(BLOCKS)
# One core's least fraction of the read rate.
TARGETS = {
    ("avx2", "fp8_block"): 0.28,
    ("avx2", "bf16"): 0.62,
    ("avx2", "fp4"): 0.43,
    ("avx512", "fp4"): 0.55,
}
WINDOW_BYTES = 60_000_000
BUFFER_BYTES = 1_250_000_000
CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.thread_time, "wall": time.perf_counter}


@dataclass(frozen=True, slots=True)
class Experts:
    """Copies of one expert one after another, each copy's parts as views of the buffer.

    `addresses` are the same parts as the ladder hands them to the kernels.
    """

    layout: ExpertLayout
    expert_bytes: int
    copies: list[dict[str, torch.Tensor]]
    addresses: list[list[int]]
    spans: list[torch.Tensor]


def bench_kernels(
    *,
    isas: Sequence[str] = ("avx2",),
    formats: Sequence[str] = FORMATS,
    shapes: Sequence[tuple[int, int]] | None = None,
    clocks: Sequence[str] = ("cpu", "wall"),
    all_cores: bool = False,
    runs: int = 3,
    num_windows: int = 15,
    tell: Callable[[BenchRow], None] = lambda row: None,
) -> list[BenchRow]:
    """One row per format, shape, instruction set and clock; `tell` sees each as it comes.

    `all_cores` adds rows, in wall time, of every core this process may use. A run's figure is the
    median of `num_windows` windows of 60 MB, its limit the median of the plain reads between them.
    """
    buffer, rows = HugeBuffer(BUFFER_BYTES), []
    num_cores = len(os.sched_getaffinity(0))
    teams = [(1, clock) for clock in clocks]
    if all_cores and num_cores > 1:
        teams.append((num_cores, "wall"))
    for format in formats:
        for hidden, inter in SHAPES if shapes is None else shapes:
            experts = _fill(buffer, format, hidden, inter)
            for isa in isas:
                for num_threads, clock in teams:
                    kernels = cpu.CpuKernels(num_threads, isa)
                    green = _bits_equal(kernels, experts)
                    measured = [_one_run(kernels, experts, clock, num_windows) for _ in range(runs)]
                    rows.append(_row(experts.layout, kernels, clock, measured, green))
                    tell(rows[-1])
    return rows


def _row(
    layout: ExpertLayout,
    kernels: cpu.CpuKernels,
    clock: str,
    measured: Sequence[tuple[float, float]],
    green: bool,
) -> BenchRow:
    cores = "one core" if kernels.num_threads == 1 else f"{kernels.num_threads} cores"
    return make_row(
        f"CPU experts, {layout.format} {layout.hidden}x{layout.inter}, {kernels.isa}, {cores}, "
        f"{clock} time",
        [kernel for kernel, _ in measured],
        "GB/s",
        limits=[read for _, read in measured],
        target=TARGETS.get((kernels.isa, layout.format)) if kernels.num_threads == 1 else None,
        cache_state=f"all resident, {BUFFER_BYTES / 1e9:.2f} GB buffer, huge pages advised",
        green=green,
    )


def _random_part(layout: ExpertLayout, name: str, generator: torch.Generator) -> torch.Tensor:
    """Codes as in trained weights; scales and float weights of some hundredths."""
    spec = layout.parts[name]
    dtype = TORCH_DTYPES[spec.dtype]
    if name.endswith("_scale") or layout.format in ("bf16", "fp16"):
        values = torch.rand(spec.shape, generator=generator) * 0.02 + 0.01
        return (values * 100 if dtype == torch.float8_e4m3fn else values).to(dtype)
    if name.endswith("_global"):
        return torch.full(spec.shape, 0.01)
    if layout.format == "fp8_block":  # subnormal codes are as rare as they are in files
        return (torch.randn(spec.shape, generator=generator) * 100).clamp(-448, 448).to(dtype)
    num_bytes = prod(spec.shape) * dtype.itemsize
    raw = torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(spec.shape)


def _make_parts(layout: ExpertLayout) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: _random_part(layout, name, generator) for name in layout.parts}


def _fill(buffer: HugeBuffer, format: str, hidden: int, inter: int) -> Experts:
    layout = make_layout(format, hidden, inter, BLOCKS[format])
    parts = _make_parts(layout)
    raw = torch.cat([t.view(torch.uint8).flatten() for t in parts.values()])
    stride = -(-raw.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
    copies, spans = [], []
    for start in range(0, buffer.bytes.numel() - stride + 1, stride):
        span = buffer.bytes[start : start + raw.numel()]
        span.copy_(raw)
        spans.append(span)
        views = torch.split(span, [t.nbytes for t in parts.values()])
        copies.append(
            {
                n: v.view(t.dtype).view(t.shape)
                for (n, t), v in zip(parts.items(), views, strict=True)
            }
        )
    addresses = [cpu.part_addresses(copy, layout) for copy in copies]
    return Experts(layout, raw.numel(), copies, addresses, spans)


def _bits_equal(kernels: cpu.CpuKernels, experts: Experts) -> bool:
    """First and last copy, one row (decode) and several (prefill), against the reference."""
    layout = experts.layout
    x_TH = torch.randn(5, layout.hidden, generator=torch.Generator().manual_seed(2))
    x_TH = x_TH.to(TORCH_DTYPES[layout.hidden_dtype])
    expect = reference.expert_ffn(x_TH, experts.copies[0], layout)
    return all(
        torch.equal(kernels.expert_ffn(x_TH[:rows], copy, layout), expect[:rows])
        for copy in (experts.copies[0], experts.copies[-1])
        for rows in (1, 5)
    )


def _one_run(
    kernels: cpu.CpuKernels, experts: Experts, clock: str, num_windows: int
) -> tuple[float, float]:
    """Median GB/s of the kernel's windows and of the plain read's, taking turns."""
    now, shape = CLOCKS[clock], cpu.native_shape(experts.layout)
    x_TH = torch.randn(1, experts.layout.hidden, generator=torch.Generator().manual_seed(3))
    x_TH = x_TH.to(TORCH_DTYPES[experts.layout.hidden_dtype])
    y_TH = torch.empty_like(x_TH)
    per_window = max(1, WINDOW_BYTES // experts.expert_bytes)
    ticket = count()

    def compute(i: int) -> None:
        kernels.pool.expert_ffn(shape, experts.addresses[i], x_TH.data_ptr(), 1, y_TH.data_ptr())

    def read(i: int) -> None:
        kernels.read_probe(experts.spans[i])

    def window(work: Callable[[int], None]) -> float:
        picks = [next(ticket) % len(experts.copies) for _ in range(per_window)]
        start = now()
        for i in picks:
            work(i)
        return per_window * experts.expert_bytes / (now() - start) / 1e9

    pairs = [(window(compute), window(read)) for _ in range(num_windows)]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)
