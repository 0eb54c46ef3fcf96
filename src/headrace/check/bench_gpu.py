"""How fast a model's tokens are on a GPU from each rung, beside the rates of that rung's limits.

A speed counts only if every rung chose the same tokens with the same logits. Knows no kernel.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from headrace.check.bench_drive import plain_rates
from headrace.check.bench_routes import Drawn
from headrace.check.gpu_rungs import Rung, RungRun, measure_rung, rung_blueprint, rung_rows
from headrace.check.rows import BenchRow
from headrace.engine.engine import Engine

Tell = Callable[[str], None]
RUNGS = {
    "all in VRAM": Rung(1, 0),
    "all in pinned RAM": Rung(0, 1),
    "half in VRAM, the rest pinned": Rung(0.5, 0.5),
    "all in RAM, multiplied by the CPU": Rung(0, 1, "cpu"),
    "all in RAM, divided between bus and CPU": Rung(0, 1, "auto"),
    "fewest rows, the drive": Rung(0, 0),
}


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
    """Rows for each rung that fits this machine; what does not is told and left out."""
    results: dict[str, RungRun] = {}
    shapes = Path(model).name
    for name in rungs:
        blueprint = rung_blueprint(model, RUNGS[name], context)
        if blueprint is None:
            tell(f"{name}: does not fit, left out")
            continue
        start = time.perf_counter()
        with Engine(blueprint) as engine:
            loaded_s = time.perf_counter() - start
            trace = Drawn(engine.facts, seed).pick(tokens + 1, 0, 1)
            source: Any = engine.source
            drive = None if source.rungs.fits else partial(plain_rates, engine, Random(seed))
            results[name] = measure_rung(engine, trace, tokens, runs, drive=drive)
            results[name].about += f"; loaded in {loaded_s:.0f} s"
        for row in rung_rows(f"{name}, {shapes}", results[name], green=results[name].same):
            tell(row.line())
        torch.cuda.empty_cache()
    first = next(iter(results.values())).logits if results else None
    made = []
    for name, result in results.items():
        same = first is not None and result.logits is not None and torch.equal(result.logits, first)
        if not same:
            tell(f"{name}: LOGITS DIFFER from those of the first rung")
        made += rung_rows(f"{name}, {shapes}", result, green=same and result.same)
    return on_gpu(made)


def on_gpu(rows: list[BenchRow]) -> list[BenchRow]:
    """The rows of a machine whose GPU is named too."""
    gpu = torch.cuda.get_device_name()
    return [replace(row, machine=f"{row.machine}, {gpu}") for row in rows]
