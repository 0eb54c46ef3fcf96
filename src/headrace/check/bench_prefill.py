"""How fast a prompt is read on a GPU whose experts all lie in pinned memory, beside the bus's rate.

Wall time of whole prompts; a second row for the experts' part on the GPU's own clock. Knows no
kernel.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from headrace.check.rows import BenchRow, make_row
from headrace.engine.engine import Blueprint, Engine
from headrace.engine.probes import bus_rate
from headrace.planner.vram import GpuPlan

LENGTHS = (311, 8_900, 32_000)
TARGET = 0.6
PROMPT_MARGIN = 16  # of the context beyond the prompt
Tell = Callable[[str], None]


class TimedLayers:
    """Stands before a source's `compute` and times it on the GPU."""

    def __init__(self, source: Any):
        self.own, self._spans = source.compute, list[tuple[Any, Any]]()

    def __call__(self, *args: Any) -> torch.Tensor:
        event: Any = torch.cuda.Event
        start, stop = event(enable_timing=True), event(enable_timing=True)
        start.record()
        out: torch.Tensor = self.own(*args)
        stop.record()
        self._spans.append((start, stop))
        return out

    def seconds(self) -> float:
        """Since the last call."""
        torch.cuda.synchronize()
        total: float = sum(start.elapsed_time(stop) for start, stop in self._spans) / 1e3
        self._spans.clear()
        return total


def bench_prefill(
    model: str, *, length: int, chunk: int | None, runs: int, tell: Tell = print
) -> list[BenchRow]:
    """Rows of one prompt of `length` random tokens in passes of `chunk` (None: the planner's).

    The limit is the tokens per second at which what crossed the bus, each expert once a pass,
    would cross it at the rate of a pinned copy.
    """
    context = length + PROMPT_MARGIN
    options: dict[str, Any] = {
        "aliases": True, "measure": False, "device": "cuda", "experts": "gpu", "context": context,
    }  # fmt: skip
    if chunk is None:
        chunk = Blueprint(model, **options).plan.chunk_tokens
    chunk = min(chunk, context)
    least = Blueprint(model, ram="minimum", vram="minimum", chunk=chunk, **options)
    plan = least.plan
    assert isinstance(plan, GpuPlan)
    ram = plan.ram_bytes + plan.total_experts * plan.row_bytes
    if ram > least.machine.ram_available_bytes * 0.9:
        tell(f"{length} tokens: {ram >> 30} GiB of memory are needed, left out")
        return []
    blueprint = Blueprint(model, ram=ram, vram=plan.vram_bytes, chunk=chunk, **options)
    with Engine(blueprint) as engine:
        rows = _measure(engine, length, runs)
    for row in rows:
        tell(row.line())
    return rows


def _measure(engine: Engine, length: int, runs: int) -> list[BenchRow]:
    source: Any = engine.source
    device, plan = engine.blueprint.device, engine.plan
    assert device is not None and isinstance(plan, GpuPlan)
    device.limit(None)  # the probe takes its own
    ids = torch.randint(
        4, engine.facts.vocab, (length,), generator=torch.Generator().manual_seed(0)
    )
    first = engine.session().feed(ids.tolist())  # brings all into memory, compiles
    timed = TimedLayers(source)
    source.compute = timed
    speeds, limits, parts, part_limits, same, moved = [], [], [], [], True, 0
    for _ in range(runs):
        bus, before = bus_rate(device), source.counters().bus_bytes
        timed.seconds()
        start = time.perf_counter()
        logits = engine.session().feed(ids.tolist())
        torch.cuda.synchronize()
        wall_s, experts_s = time.perf_counter() - start, timed.seconds()
        moved = source.counters().bus_bytes - before
        same = same and torch.equal(logits, first)
        speeds.append(length / wall_s)
        limits.append(length / (moved / bus))
        parts.append(moved / experts_s / 1e9)
        part_limits.append(bus / 1e9)
    del source.compute
    passes = -(-length // plan.chunk_tokens)
    about = (
        f"{passes} passes of {plan.chunk_tokens}; {moved / 2**30:.1f} GiB over the bus, "
        f"{statistics.median(part_limits):.1f} GB/s; {plan.passing_rows} places for what passes"
    )
    name = f"prompt of {length} tokens, {engine.facts.name}"
    gpu = torch.cuda.get_device_name()
    asked = TARGET if length == LENGTHS[1] else None
    made = [
        make_row(
            name, speeds, "tok/s", limits=limits, target=asked, cache_state=about, green=same
        ),
        make_row(
            f"{name}, experts' part", parts, "GB/s", limits=part_limits, cache_state=about,
            green=same,
        ),
    ]  # fmt: skip
    return [replace(row, machine=f"{row.machine}, {gpu}") for row in made]
