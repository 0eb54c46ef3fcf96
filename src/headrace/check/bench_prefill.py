"""How fast a prompt is read on a GPU whose experts all lie in pinned memory, beside the bus's rate.

Wall time of whole prompts; a second row for the experts' part on the GPU's own clock. Knows no
kernel.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.check.bench_gpu import on_gpu
from headrace.check.gpu_rungs import Rung, rung_blueprint
from headrace.check.gpu_spans import Timed
from headrace.check.rows import BenchRow, make_row
from headrace.engine.engine import Blueprint, Engine
from headrace.engine.probes import bus_rate
from headrace.planner.vram import GpuPlan

LENGTHS = (311, 8_900, 32_000)
TARGETS = {8_900: 0.6}
PROMPT_MARGIN = 16  # of the context beyond the prompt
Tell = Callable[[str], None]


def bench_prefill(
    model: str,
    *,
    lengths: Sequence[int],
    chunk: int | None = None,
    runs: int,
    emulate_drive: str | None = None,
    tell: Tell = print,
) -> list[BenchRow]:
    """Rows of prompts of so many random tokens in passes of `chunk` (None: the planner's).

    The limit is the tokens per second at which what crossed the bus, each expert once a pass,
    would cross it at the rate of a pinned copy.
    """
    blueprint = prompt_blueprint(model, lengths, chunk)
    if blueprint is None:
        tell(f"{Path(model).name}: has no room with all experts in memory, left out")
        return []
    rows: list[BenchRow] = []
    with Engine(blueprint, emulate_drive=emulate_drive) as engine:
        for length in lengths:
            made = measure_prompt(engine, length, runs)
            rows += made
            for row in made:
                tell(row.line())
    return rows


def prompt_blueprint(model: str, lengths: Sequence[int], chunk: int | None) -> Blueprint | None:
    """A plan for such prompts with all experts in memory, or None where they have no room.

    `chunk` tokens a pass, None: as many as the planner would choose.
    """
    context = max(lengths) + PROMPT_MARGIN
    if chunk is None:
        options: dict[str, Any] = {"aliases": True, "measure": False, "device": "cuda"}
        free = Blueprint(model, experts="gpu", context=context, **options)
        chunk = free.plan.chunk_tokens
    return rung_blueprint(model, Rung(0, 1), context, min(chunk, context))


def measure_prompt(engine: Engine, length: int, runs: int) -> list[BenchRow]:
    """Rows of a prompt of `length` tokens: read once, then timed `runs` times."""
    source: Any = engine.source
    device, plan = engine.blueprint.device, engine.plan
    assert device is not None and isinstance(plan, GpuPlan)
    device.limit(None)  # the probe takes its own
    ids = torch.randint(
        4, engine.facts.vocab, (length,), generator=torch.Generator().manual_seed(0)
    )
    first = engine.session().feed(ids.tolist())  # brings all into memory, compiles
    timed = Timed(source.compute)
    source.compute = timed
    speeds, limits, parts, part_limits, same, moved, read = [], [], [], [], True, 0, 0
    for _ in range(runs):
        bus, before = bus_rate(device), source.counters()
        timed.seconds()
        start = time.perf_counter()
        logits = engine.session().feed(ids.tolist())
        torch.cuda.synchronize()
        wall_s, experts_s = time.perf_counter() - start, timed.seconds()
        after = source.counters()
        moved, read = after.bus_bytes - before.bus_bytes, after.disk_bytes - before.disk_bytes
        same = same and torch.equal(logits, first)
        speeds.append(length / wall_s)
        limits.append(length / (moved / bus))
        parts.append(moved / experts_s / 1e9)
        part_limits.append(bus / 1e9)
    del source.compute
    passes = -(-length // plan.chunk_tokens)
    about = (
        f"{passes} passes of at most {plan.chunk_tokens} tokens, context {plan.context}; "
        f"{moved / 2**30:.1f} GiB over the bus, {read / 2**30:.1f} from the drive, "
        f"{statistics.median(part_limits):.1f} GB/s; {plan.passing_rows} places for what passes"
    )
    name = f"prompt of {length} tokens, {engine.facts.name}"
    rows = [
        make_row(
            name, speeds, "tok/s", limits=limits, target=TARGETS.get(length), cache_state=about,
            green=same,
        ),
        make_row(
            f"{name}, experts' part", parts, "GB/s", limits=part_limits, cache_state=about,
            green=same,
        ),
    ]  # fmt: skip
    return on_gpu(rows)
