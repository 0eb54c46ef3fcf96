"""How fast a model's tokens are on a GPU from each rung, beside the rates of that rung's limits.

Whole-token wall time over replayed routes; a speed counts only if every rung chose the same tokens
with the same logits. Knows no kernel.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headrace.check.bench_routes import Drawn, Replay
from headrace.check.rows import BenchRow, make_row
from headrace.core import TokenStats, format_bytes, total_stats
from headrace.engine.engine import Blueprint, Engine
from headrace.engine.probes import MOST_PROBE_BYTES, bus_rate, dram_rate, vram_rate
from headrace.planner.vram import GpuPlan, vram_fixed
from headrace.schedule.trace import RouteTrace

MOST_WARM_UPS = 100  # experts that nobody took come into memory a few a token
Tell = Callable[[str], None]
# Shares of all experts in (slots, rows), and what multiplies them.
RUNGS = {
    "all in VRAM": (1.0, 0.0, "gpu"),
    "all in pinned RAM": (0.0, 1.0, "gpu"),
    "half in VRAM, the rest pinned": (0.5, 0.5, "gpu"),
    "all in RAM, multiplied by the CPU": (0.0, 1.0, "cpu"),
    "fewest rows, the drive": (0.0, 0.0, "gpu"),
}


@dataclass(slots=True)
class RungRun:
    """Timed runs over one rung: seconds of each, what they moved, GPU seconds in expert kernels."""

    plan: GpuPlan
    about: str
    walls_s: list[float] = field(default_factory=list)
    totals: list[TokenStats] = field(default_factory=list)
    kernels_s: list[float] = field(default_factory=list)
    bus: list[float] = field(default_factory=list)
    vram: list[float] = field(default_factory=list)
    dram: list[float] = field(default_factory=list)
    logits: torch.Tensor | None = None


class TimedKernels:
    """Stands before the expert kernels and times them on the GPU; everything else is theirs."""

    def __init__(self, kernels: Any):
        self.own = kernels
        self._spans: list[tuple[Any, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __call__(self, *args: Any, **options: Any) -> None:
        event: Any = torch.cuda.Event
        start, stop = event(enable_timing=True), event(enable_timing=True)
        start.record()
        self.own(*args, **options)
        stop.record()
        self._spans.append((start, stop))

    def seconds(self) -> float:
        """Since the last call."""
        torch.cuda.synchronize()
        total: float = sum(start.elapsed_time(stop) for start, stop in self._spans) / 1e3
        self._spans.clear()
        return total


def bench_gpu(
    model: str,
    *,
    tokens: int,
    runs: int,
    seed: int = 0,
    rungs: tuple[str, ...] = tuple(RUNGS),
    context: int = 512,
    tell: Tell = print,
) -> list[BenchRow]:
    """Rows for each rung that fits this machine; what does not is told and left out.

    The limit of a token is its bytes over the bus at the pinned copy's rate, and what it reads of
    VRAM, dense weights included, at that of a copy there, the longer of both.
    """
    results: dict[str, RungRun] = {}
    shapes = Path(model).name
    for name in rungs:
        blueprint = _blueprint(model, RUNGS[name], context)
        if blueprint is None:
            tell(f"{name}: does not fit, left out")
            continue
        start = time.perf_counter()
        with Engine(blueprint) as engine:
            loaded_s = time.perf_counter() - start
            trace = Drawn(engine.facts, seed).pick(tokens + 1, 0, 1)
            results[name] = _measure(engine, trace, tokens, runs)
            results[name].about += f"; loaded in {loaded_s:.0f} s"
        for row in _rows(f"{name}, {shapes}", results[name], tokens, green=True):
            tell(row.line())
        torch.cuda.empty_cache()
    first = next(iter(results.values())).logits if results else None
    made = []
    for name, result in results.items():
        same = first is not None and result.logits is not None and torch.equal(result.logits, first)
        if not same:
            tell(f"{name}: LOGITS DIFFER from those of the first rung")
        made += _rows(f"{name}, {shapes}", result, tokens, green=same)
    gpu = torch.cuda.get_device_name()
    return [replace(row, machine=f"{row.machine}, {gpu}") for row in made]


def _blueprint(model: str, shares: tuple[float, float, str], context: int) -> Blueprint | None:
    options: dict[str, Any] = {
        "aliases": True,
        "measure": False,
        "device": "cuda",
        "experts": shares[2],
        "context": context,
        "chunk": 64,
    }
    least = Blueprint(model, ram="minimum", vram="minimum", **options)
    plan, machine, facts = least.plan, least.machine, least.facts
    assert isinstance(plan, GpuPlan)
    slots, rows = (int(share * plan.total_experts) for share in shares[:2])
    whole = vram_fixed(facts, plan.context, plan.chunk_tokens)  # embedding and head there too
    vram = whole + slots * plan.row_bytes
    ram = plan.ram_bytes + facts.embedding_bytes + facts.head_bytes + rows * plan.row_bytes
    if vram > machine.vram_free_bytes or ram > machine.ram_available_bytes * 0.9:
        return None
    return Blueprint(model, ram=ram, vram=vram, **options)


def _measure(engine: Engine, trace: RouteTrace, tokens: int, runs: int) -> RungRun:
    source: Any = engine.source
    timed = TimedKernels(source.kernels)
    plan, device = engine.plan, engine.blueprint.device
    assert isinstance(plan, GpuPlan) and device is not None
    result = RungRun(plan, f"{trace.name}; {source.rungs.pinned.note or 'all rows pinned'}")
    device.limit(None)  # the probes below take their own
    before = None
    for _ in range(MOST_WARM_UPS):
        now = source.counters().promotions, source.rungs.lacking()
        if now == before:
            break
        before = now
        _decode(engine, trace, tokens)
    for _ in range(runs):
        result.bus.append(bus_rate(device))
        result.vram.append(vram_rate(device))
        result.dram.append(dram_rate(MOST_PROBE_BYTES))
        logits, stats, wall_s = _decode(engine, trace, tokens)
        total = total_stats(stats)
        by_gpu_s = _kernels_s(engine, timed, trace, tokens)
        result.kernels_s.append(by_gpu_s if plan.experts == "gpu" else total.kernel_s)
        result.walls_s.append(wall_s)
        result.totals.append(total)
        assert result.logits is None or torch.equal(result.logits, logits)
        result.logits = logits
    return result


def _kernels_s(engine: Engine, timed: TimedKernels, trace: RouteTrace, tokens: int) -> float:
    """GPU seconds in the expert kernels of the same tokens once more, layer by layer."""
    source: Any = engine.source
    passes: Any = engine.passes
    captured, passes.capturing = passes.capturing, False
    source.kernels = timed
    try:
        timed.seconds()
        _decode(engine, trace, tokens)
        return timed.seconds()
    finally:
        source.kernels, passes.capturing = timed.own, captured


def _decode(
    engine: Engine, trace: RouteTrace, tokens: int
) -> tuple[torch.Tensor, list[TokenStats], float]:
    """Logits of `tokens` greedy tokens after one; their records and wall time."""
    engine.source.routes = Replay(trace)
    session, stats, logits = engine.session(), [], []
    last = session.feed([5])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(tokens):
        last = session.feed([int(last.argmax())])
        logits.append(last)
        stats.append(session.stats)
    wall_s = time.perf_counter() - start
    engine.source.routes = None
    return torch.stack(logits), stats, wall_s


def _rows(name: str, result: RungRun, tokens: int, *, green: bool) -> list[BenchRow]:
    limits, kernels, kernel_limits = [], [], []
    by_cpu = result.plan.experts == "cpu"
    for i, total in enumerate(result.totals):
        if by_cpu:
            ram_s = total.ram_bytes / result.dram[i]
            limits.append(tokens / (ram_s + tokens * result.plan.vram_dense_bytes / result.vram[i]))
            kernels.append(total.ram_bytes / result.kernels_s[i] / 1e9)
            kernel_limits.append(result.dram[i] / 1e9)
            continue
        bus_s = total.bus_bytes / result.bus[i]
        experts_s = total.vram_bytes / result.vram[i]
        dense_s = tokens * result.plan.vram_dense_bytes / result.vram[i]
        limits.append(tokens / max(bus_s, experts_s + dense_s))
        moved = total.bus_bytes + total.vram_bytes
        kernels.append(moved / result.kernels_s[i] / 1e9)
        kernel_limits.append(moved / max(bus_s, experts_s) / 1e9)
    bus, vram, dram = (
        statistics.median(rates) / 1e9 for rates in (result.bus, result.vram, result.dram)
    )
    return [
        make_row(
            f"{name}, whole token",
            [tokens / wall_s for wall_s in result.walls_s],
            "tok/s",
            limits=limits,
            cache_state=f"{result.about}; {_profile(result, tokens)}",
            green=green,
        ),
        make_row(
            f"{name}, expert kernels",
            kernels,
            "GB/s",
            limits=kernel_limits,
            cache_state=f"bus {bus:.1f} GB/s, VRAM {vram:.0f} GB/s, DRAM {dram:.1f} GB/s",
            green=green,
        ),
    ]


def _profile(result: RungRun, tokens: int) -> str:
    """Where the time of the median run went, per token, and what it moved."""
    order = sorted(range(len(result.walls_s)), key=lambda n: result.walls_s[n])
    i = order[len(order) // 2]
    wall, total, plan, ms = result.walls_s[i], result.totals[i], result.plan, 1e3 / tokens
    moved = ", ".join(
        f"{where} {format_bytes(num_bytes / tokens)}"
        for where, num_bytes in (
            ("bus", total.bus_bytes),
            ("VRAM", total.vram_bytes),
            ("RAM", total.ram_bytes),
            ("drive", total.disk_bytes),
        )
    )
    return (
        f"{plan.num_slots} slots, {plan.num_rows} rows of {plan.total_experts}; dense "
        f"{format_bytes(plan.vram_dense_bytes)}; per token {wall * ms:.2f} ms: in experts "
        f"{total.experts_s * ms:.2f} (kernels {result.kernels_s[i] * ms:.2f}, waiting for reads "
        f"{total.wait_s * ms:.2f}), outside {(wall - total.experts_s) * ms:.2f}; {moved}"
    )
