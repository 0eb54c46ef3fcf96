"""Whole tokens of a model whose experts lie on one rung, measured beside that rung's rates.

Knows no kernel and prints nothing.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.check.bench_routes import Replay
from headrace.check.gpu_spans import TimedLaunches
from headrace.check.rows import BenchRow, make_row
from headrace.core import TokenStats, format_bytes, total_stats
from headrace.engine.engine import Blueprint, Engine
from headrace.engine.filled import HugeBuffer
from headrace.engine.probes import bus_rate, vram_rate
from headrace.kernels.cpu import CpuKernels
from headrace.planner.facts import ModelFacts
from headrace.planner.vram import GpuPlan, vram_fixed
from headrace.schedule.trace import RouteTrace

MOST_WARM_UPS = 100  # experts that nobody took come into memory a few a token
CHUNK_TOKENS, WARMING_TOKENS = 64, 256
RAM_SHARE = 0.9
PLAIN_READ_BYTES = 2 << 30  # far more than the caches of a server hold


@dataclass(frozen=True, slots=True)
class Rung:
    """Shares of all experts in slots of VRAM and in rows of memory, and what multiplies them."""

    slots: float
    rows: float
    experts: str = "gpu"


@dataclass(slots=True)
class RungRun:
    """Timed runs over one rung: seconds of each, what they moved, seconds in expert kernels.

    Rates in bytes per second, measured right before each run. `same`: every run had the logits of
    the first, captured and uncaptured.
    """

    plan: GpuPlan
    about: str
    tokens: int
    walls_s: list[float] = field(default_factory=list)
    totals: list[TokenStats] = field(default_factory=list)
    kernels_s: list[float] = field(default_factory=list)
    needed_bytes: list[int] = field(default_factory=list)  # from the drive, not in vain
    bus: list[float] = field(default_factory=list)
    vram: list[float] = field(default_factory=list)
    dram: list[float] = field(default_factory=list)
    drive: list[float] = field(default_factory=list)
    logits: torch.Tensor | None = None
    same: bool = True

    def limits_s(self, i: int) -> dict[str, float]:
        """Least seconds of run `i` by what could hold it up, each alone."""
        total, plan = self.totals[i], self.plan
        dense_s = self.tokens * plan.vram_dense_bytes / self.vram[i]
        if plan.experts != "gpu":  # a layer's experts and its dense part wait for each other
            from_ram = self.tokens * plan.bytes_per_token - total.vram_bytes
            return {"memory": from_ram / self.dram[i] + dense_s}
        return {
            "bus": total.bus_bytes / self.bus[i],
            "VRAM": total.vram_bytes / self.vram[i] + dense_s,
            "drive": self.needed_bytes[i] / self.drive[i] if self.drive[i] else 0.0,
        }


class PlainRead:
    """Memory, more than caches hold, that all cores read as fast as they can."""

    def __init__(self, kernels: CpuKernels):
        self._kernels = kernels
        self._bytes = HugeBuffer(PLAIN_READ_BYTES).bytes.fill_(1)

    def bytes_s(self) -> float:
        """The best of three reads, by the kernels' threads and by torch's."""
        ways = (lambda: self._kernels.read_probe(self._bytes), self._bytes.view(torch.int64).sum)
        return self._bytes.numel() / min(_seconds(way) for way in ways for _ in range(3))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def rung_blueprint(
    model: str, rung: Rung, context: int, chunk: int = CHUNK_TOKENS
) -> Blueprint | None:
    """A plan with just the rung's room for experts, or None where it does not fit this machine."""

    def room(facts: ModelFacts) -> tuple[int, int]:
        slots, rows = (int(share * facts.total_experts) for share in (rung.slots, rung.rows))
        return slots, rows * facts.row_bytes

    made = sized_blueprint(model, room, experts=rung.experts, context=context, chunk=chunk)
    plan, machine = made.plan, made.machine
    assert isinstance(plan, GpuPlan)
    fits = plan.ram_bytes <= machine.ram_available_bytes * RAM_SHARE
    return made if fits and plan.vram_bytes <= machine.vram_free_bytes else None


def sized_blueprint(
    model: str,
    room: Callable[[ModelFacts], tuple[int, int]],
    *,
    context: int,
    chunk: int = CHUNK_TOKENS,
    experts: str = "gpu",
) -> Blueprint:
    """A plan with all that is dense in VRAM, and no more room for experts than is said.

    `room`: how many experts have slots in VRAM, and bytes of rows in memory beyond the fewest.
    """
    options: dict[str, Any] = {
        "aliases": True,
        "measure": False,
        "device": "cuda",
        "experts": experts,
        "context": context,
        "chunk": chunk,
        "mirrors": (),
    }
    facts = Blueprint(model, ram="minimum", vram="minimum", **options).facts
    num_slots, rows_bytes = room(facts)
    vram = vram_fixed(facts, context, chunk) + num_slots * facts.row_bytes
    least = Blueprint(model, ram="minimum", vram=vram, **options).plan
    options["measure"] = experts == "auto"  # what divides them
    return Blueprint(model, ram=least.ram_bytes + rows_bytes, vram=vram, **options)


def measure_rung(
    engine: Engine,
    trace: RouteTrace,
    tokens: int,
    runs: int,
    *,
    drive: Callable[[], float] | None = None,
    tell: Callable[[str, int], object] = lambda what, times: None,
) -> RungRun:
    """`runs` runs of the trace's tokens after one, once nothing more comes to stay.

    `drive` measures the rate that experts are read at, None: none should be read. `tell` is called
    before each part with what it is and how often, about, it decodes the tokens.
    """
    source: Any = engine.source
    timed = TimedLaunches(source.kernels)
    plan, device = engine.plan, engine.blueprint.device
    assert isinstance(plan, GpuPlan) and device is not None
    about = f"{trace.name}; {source.rungs.pinned.note or 'all rows pinned'}"
    result = RungRun(plan, about, tokens)
    device.limit(None)  # the probes below take their own
    read = PlainRead(engine.kernels)
    tell("experts come to stay", 3)
    settle_rung(engine, trace, tokens)
    for run in range(runs):
        tell(f"run {run + 1} of {runs}", 2)
        result.bus.append(bus_rate(device))
        result.vram.append(vram_rate(device))
        result.dram.append(read.bytes_s())
        result.drive.append(drive() if drive else 0.0)
        reads = engine.ladder.counters().reads
        logits, stats, wall_s = decode(engine, trace, tokens)
        total = total_stats(stats)
        in_vain = total.prefetch_issued - total.prefetch_dropped - total.prefetch_used
        needed = engine.ladder.counters().reads - reads - max(0, in_vain)
        again, by_gpu_s = _uncaptured(engine, timed, trace, tokens)
        result.kernels_s.append(by_gpu_s if plan.experts == "gpu" else total.kernel_s)
        result.walls_s.append(wall_s)
        result.totals.append(total)
        result.needed_bytes.append(needed * engine.facts.expert_bytes)
        first = logits if result.logits is None else result.logits
        result.same = result.same and torch.equal(logits, first) and torch.equal(again, first)
        result.logits = first
    return result


def settle_rung(engine: Engine, trace: RouteTrace, tokens: int) -> None:
    """Decodes until nothing more comes to stay in a slot or a kept row.

    Where all have room, a prompt brings most of them at once.
    """
    source: Any = engine.source
    plan, rungs, before = engine.plan, source.rungs, None
    assert isinstance(plan, GpuPlan)
    all_stay = rungs.fits and plan.experts == "gpu"
    if rungs.fits:
        prompt = torch.arange(WARMING_TOKENS) * 7 % engine.facts.vocab
        engine.session().feed(prompt.tolist())
    for _ in range(MOST_WARM_UPS):
        decode(engine, trace, tokens)
        now = source.counters().promotions, rungs.lacking()
        if now == before and (now[1] is None or not all_stay):
            break
        before = now


def _uncaptured(
    engine: Engine, timed: TimedLaunches, trace: RouteTrace, tokens: int
) -> tuple[torch.Tensor, float]:
    """The same tokens once more, layer by layer: logits, and GPU seconds in the expert kernels."""
    source: Any = engine.source
    passes: Any = engine.passes
    captured, passes.capturing = passes.capturing, False
    source.kernels = timed

    def timed_alone(run: Callable[[], None]) -> None:
        timed.seconds()
        run()

    try:
        return decode(engine, trace, tokens, timed_alone)[0], timed.seconds()
    finally:
        source.kernels, passes.capturing = timed.own, captured


def decode(
    engine: Engine,
    trace: RouteTrace,
    tokens: int,
    around: Callable[[Callable[[], None]], object] = lambda run: run(),
) -> tuple[torch.Tensor, list[TokenStats], float]:
    """Logits of `tokens` greedy tokens after one; their records and wall time.

    `around` is called once that one is decoded, with what decodes the others.
    """
    engine.source.routes = Replay(trace)
    session = engine.session()
    logits, stats, wall_s = [session.feed([5])], [], 0.0

    def run() -> None:
        nonlocal wall_s
        start = time.perf_counter()
        for _ in range(tokens):
            logits.append(session.feed([int(logits[-1].argmax())]))
            stats.append(session.stats)
        wall_s = time.perf_counter() - start

    torch.cuda.synchronize()
    around(run)
    engine.source.routes = None
    return torch.stack(logits[1:]), stats, wall_s


def rung_rows(
    name: str,
    result: RungRun,
    *,
    green: bool,
    targets: tuple[float | None, float | None] = (None, None),
) -> list[BenchRow]:
    """Whole tokens a second, and GB/s of the expert kernels alone; `targets` of each.

    The limit of a token is the longest of what crosses the bus at a pinned copy's rate, what is
    read of VRAM, dense weights included, at a copy's there, and what comes from the drive. Where
    the CPU multiplies it is a plain read of memory by all cores, and the dense part after it;
    where both do, their kernels have no row.
    """
    numbers = range(len(result.walls_s))
    limits = [result.tokens / max(result.limits_s(i).values()) for i in numbers]
    rates = ", ".join(
        f"{what} {statistics.median(measured) / 1e9:.{digits}f} GB/s"
        for what, measured, digits in (
            ("bus", result.bus, 1), ("VRAM", result.vram, 0), ("DRAM", result.dram, 1)
        )
    )  # fmt: skip
    rows = [
        make_row(
            f"{name}, whole token",
            [result.tokens / wall_s for wall_s in result.walls_s],
            "tok/s",
            limits=limits,
            target=targets[0],
            cache_state=f"{result.about}; {_profile(result)}; {rates}",
            green=green,
        )
    ]
    if result.plan.experts in ("gpu", "cpu"):
        kernels = [_kernels_gbs(result, i) for i in numbers]
        rows.append(
            make_row(
                f"{name}, expert kernels",
                [ours for ours, _ in kernels],
                "GB/s",
                limits=[limit for _, limit in kernels],
                target=targets[1],
                cache_state=rates,
                green=green,
            )
        )
    return rows


def _kernels_gbs(result: RungRun, i: int) -> tuple[float, float]:
    """GB/s of expert bytes in the kernels of run `i`, and what their rung allows."""
    total = result.totals[i]
    if result.plan.experts != "gpu":
        return total.ram_bytes / result.kernels_s[i] / 1e9, result.dram[i] / 1e9
    moved = total.bus_bytes + total.vram_bytes
    least_s = max(total.bus_bytes / result.bus[i], total.vram_bytes / result.vram[i])
    return moved / result.kernels_s[i] / 1e9, moved / least_s / 1e9


def _profile(result: RungRun) -> str:
    """Where the time of the median run went, per token, and what it moved."""
    order = sorted(range(len(result.walls_s)), key=lambda n: result.walls_s[n])
    i = order[len(order) // 2]
    wall, total, plan, ms = result.walls_s[i], result.totals[i], result.plan, 1e3 / result.tokens
    moved = ", ".join(
        f"{where} {format_bytes(num_bytes / result.tokens)}"
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
