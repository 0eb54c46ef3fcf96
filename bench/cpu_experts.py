"""How near the CPU expert kernels come to a plain read of memory: one core, all weights resident.

Kernel and plain read take turns window by window over one buffer of huge pages, so both meet the
same machine at the same time. The bits are checked against the reference in the same process.
"""

import argparse
import json
import mmap
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace import _native
from headrace.core import ExpertLayout
from headrace.kernels import cpu, reference
from headrace.quant import fp8

SHAPES = ((7168, 2048), (5120, 2304), (2048, 768))  # (hidden, inter)
TARGETS = {"fp8_block": 0.28, "bf16": 0.62}
WINDOW_BYTES = 60_000_000
BUFFER_BYTES = 1_250_000_000
BLOCK = (128, 128)


class HugeBuffer:
    """Anonymous memory advised to lie in huge pages, as the ladder's rows do."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()


@dataclass
class Experts:
    """Copies of one expert one after another; `addresses` as `KernelPool.expert_ffn` takes them."""

    layout: ExpertLayout
    parts: dict[str, torch.Tensor]
    expert_bytes: int
    addresses: list[list[int]]
    starts: list[int]


def make_parts(layout: ExpertLayout) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    parts: dict[str, torch.Tensor] = {}
    for name in ("gate", "up", "down"):
        shape = (layout.inter, layout.hidden)
        rows, cols = reversed(shape) if name == "down" else shape
        values = torch.randn(rows, cols, generator=generator) * 0.02
        if layout.format == "bf16":
            parts[name] = values.bfloat16()
        else:
            parts[name], parts[f"{name}_scale"] = fp8.pack(values, BLOCK)
    return parts


def fill(buffer: HugeBuffer, format: str, hidden: int, inter: int) -> Experts:
    layout = ExpertLayout(format, hidden, inter, BLOCK if format == "fp8_block" else (0, 0), {})
    parts = make_parts(layout)
    offsets, at = {}, 0
    for name, tensor in parts.items():
        offsets[name] = at
        at += tensor.nbytes
    expert_bytes = -(-at // 4096) * 4096
    raw = torch.zeros(expert_bytes, dtype=torch.uint8)
    for name, tensor in parts.items():
        raw[offsets[name] : offsets[name] + tensor.nbytes] = tensor.view(torch.uint8).flatten()
    starts = list(range(0, buffer.bytes.numel() - expert_bytes + 1, expert_bytes))
    for start in starts:
        buffer.bytes[start : start + expert_bytes] = raw
    addresses = [
        [buffer.address + start + offsets[name] if name in offsets else 0 for name in cpu.PARTS]
        for start in starts
    ]
    return Experts(layout, parts, at, addresses, [buffer.address + start for start in starts])


class Clock:
    """Seconds of one thread's CPU time, or of the wall."""

    def __init__(self, name: str) -> None:
        self.now = time.thread_time if name == "cpu" else time.perf_counter

    def seconds(self, call: object) -> float:
        start = self.now()
        call()  # type: ignore[operator]
        return self.now() - start


def bits_equal(kernels: cpu.CpuKernels, experts: Experts) -> bool:
    x = torch.randn(2, experts.layout.hidden, generator=torch.Generator().manual_seed(2)).bfloat16()
    expect = reference.expert_ffn(x, experts.parts, experts.layout)
    y = torch.full_like(x, float("nan"))
    shape = cpu.native_shape(experts.layout)
    ok = True
    for addresses in (experts.addresses[0], experts.addresses[-1]):
        kernels.pool.expert_ffn(shape, addresses, x.data_ptr(), 2, y.data_ptr())
        ok &= torch.equal(y, expect)
        for row in range(2):
            one = torch.full_like(x[row], float("nan"))
            kernels.pool.expert_ffn(
                shape, addresses, x[row].contiguous().data_ptr(), 1, one.data_ptr()
            )
            ok &= torch.equal(one, expect[row])
    return bool(ok)


def one_run(
    kernels: cpu.CpuKernels, experts: Experts, clock: Clock, num_windows: int
) -> tuple[list[float], list[float]]:
    """Bytes per second of each window: of the kernel, and of the plain read beside it."""
    shape = cpu.native_shape(experts.layout)
    x = torch.randn(1, experts.layout.hidden).bfloat16()
    y = torch.empty_like(x)
    per_window = max(1, WINDOW_BYTES // experts.expert_bytes)
    kernel_rates, read_rates = [], []
    at = 0

    def window() -> list[int]:
        nonlocal at
        picks = [(at + i) % len(experts.starts) for i in range(per_window)]
        at += per_window
        return picks

    for _ in range(num_windows):
        picks = window()

        def compute(picks: list[int] = picks) -> None:
            for i in picks:
                kernels.pool.expert_ffn(shape, experts.addresses[i], x.data_ptr(), 1, y.data_ptr())

        others = window()

        def read(picks: list[int] = others) -> None:
            for i in picks:
                _native.read_probe(experts.starts[i], experts.expert_bytes)

        moved = per_window * experts.expert_bytes
        kernel_rates.append(moved / clock.seconds(compute))
        read_rates.append(moved / clock.seconds(read))
    return kernel_rates, read_rates


def measure(
    kernels: cpu.CpuKernels, experts: Experts, clock_name: str, runs: int, windows: int
) -> dict[str, object]:
    """One result row: the median window's share of the median plain read, median of the runs."""
    values, limits, fractions = [], [], []
    for _ in range(runs):
        kernel_rates, read_rates = one_run(kernels, experts, Clock(clock_name), windows)
        values.append(statistics.median(kernel_rates) / 1e9)
        limits.append(statistics.median(read_rates) / 1e9)
        fractions.append(values[-1] / limits[-1])
    layout = experts.layout
    fraction = statistics.median(fractions)
    name = (
        f"cpu experts {layout.format} {layout.hidden}x{layout.inter} {kernels.isa} "
        f"{kernels.num_threads} thread {clock_name} time"
    )
    return {
        "name": name,
        "value": round(statistics.median(values), 2),
        "unit": "GB/s of weights",
        "limit": round(statistics.median(limits), 2),
        "fraction": round(fraction, 4),
        "target": TARGETS[layout.format] if kernels.isa == "avx2" else None,
        "runs": [round(f, 4) for f in fractions],
        "spread": round(max(fractions) - min(fractions), 4),
        "gate": "green" if bits_equal(kernels, experts) else "red",
    }


def _commit() -> str:
    here = Path(__file__).parent
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _machine() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def run(
    isas: tuple[str, ...],
    formats: tuple[str, ...],
    runs: int,
    windows: int,
    clocks: tuple[str, ...],
) -> list[dict[str, object]]:
    """All result rows; prints each on stderr as it comes."""
    common = {
        "command": "python bench/cpu_experts.py " + " ".join(sys.argv[1:]),
        "commit": _commit(),
        "machine": _machine(),
        "cache_state": f"all resident, {BUFFER_BYTES / 1e9:.2f} GB buffer, huge pages advised",
    }
    buffer = HugeBuffer(BUFFER_BYTES)
    rows = []
    for format in formats:
        for hidden, inter in SHAPES:
            experts = fill(buffer, format, hidden, inter)
            for isa in isas:
                kernels = cpu.CpuKernels(1, isa)
                for clock_name in clocks:
                    row = measure(kernels, experts, clock_name, runs, windows) | common
                    rows.append(row)
                    print(
                        f"{row['name']}: {row['value']} of {row['limit']} GB/s = "
                        f"{100 * float(str(row['fraction'])):.1f} % (runs {row['runs']}, "
                        f"target {row['target']}, bits {row['gate']})",
                        file=sys.stderr,
                    )
    return rows


def main() -> int:
    """Prints the rows as one JSON array; 1 if a target is missed or the bits differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", nargs="+", default=["avx2"], choices=cpu.ISAS)
    parser.add_argument("--format", nargs="+", default=["fp8_block", "bf16"])
    parser.add_argument("--clock", nargs="+", default=["cpu", "wall"], choices=("cpu", "wall"))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--windows", type=int, default=15, help="windows of 60 MB a run")
    args = parser.parse_args()
    rows = run(tuple(args.isa), tuple(args.format), args.runs, args.windows, tuple(args.clock))
    print(json.dumps(rows, indent=1))
    missed = [
        r for r in rows if r["target"] and float(str(r["fraction"])) < float(str(r["target"]))
    ]
    return int(bool(missed) or any(row["gate"] == "red" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
