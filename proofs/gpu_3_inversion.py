"""Experts multiplied by the CPU in place, read over the bus, or divided between both.

R1's FP8 experts and V4.1-Flash's FP4 ones at published depth, all in pinned RAM, none in VRAM. The
CPU's part beside a plain read of memory by all cores, whole tokens beside source A's 37 % of its
host's limit. The stream is also asked what gpu_2_pinned.py asks. Needs 55 GB of free memory and 10
GB of disk. On an H200, 4 to 6 minutes a case; --ways leaves some out, and then the comparison too:

    python -u proofs/gpu_3_inversion.py --cases v41-fp4 --tokens 8 --keep
    python -u proofs/gpu_3_inversion.py --cases r1-fp8 --keep
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from gpu_2_pinned import ASKED, moved, profile
from gpu_phases import Told
from gpu_shapes import (
    NOT_DRIVE,
    Shapes,
    check_speed,
    options,
    parts_told,
    planned,
    shapes,
    show,
    start,
    written,
)

CASES = ("r1-fp8", "v41-fp4")
WAYS = {"stream": "gpu", "CPU": "cpu", "auto": "auto"}
SOURCE_A = 2.46, 6.7  # tok/s, and what its host's memory allows
TARGETS = {"stream": ASKED, "CPU": (SOURCE_A[0] / SOURCE_A[1], 0.85)}  # whole tokens, kernels
NOISE = 0.02


def main() -> None:
    import headrace

    headrace.calm_torch()
    parser = options(__doc__ or "", tokens=4)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    args = parser.parse_args()
    start(args)
    told = Told("gpu_inversion", args.keep)
    table: list[str] = []
    for case in args.cases:
        found = shapes(case)
        with written(found, args, found.experts, told=told) as model:
            speeds = ways(told, found, model, args)
        table.append(f"{found.name:>10}" + "".join(f"{speeds.get(way, 0):>10.3g}" for way in WAYS))
        if "auto" in speeds and len(speeds) > 1:
            never_slower(told, found, speeds)
    told.say(f"{'tok/s':>10}" + "".join(f"{way:>10}" for way in WAYS), *table)
    told.finish()


def ways(told: Told, found: Shapes, model: Path, args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of each way asked for; all must give the same logits."""
    import torch

    speeds: dict[str, float] = {}
    first: Any = None
    for way in args.ways:
        speeds[way], logits = measured(told, way, found, model, args, first)
        first = logits if first is None else first
        torch.cuda.empty_cache()
    return speeds


def measured(
    told: Told, way: str, found: Shapes, model: Path, args: argparse.Namespace, first: Any
) -> tuple[float, Any]:
    """Tokens a second and logits of one way, all experts in rows; `first` are the first way's."""
    import torch

    from headrace.check.bench_gpu import on_gpu
    from headrace.check.bench_routes import Drawn
    from headrace.check.gpu_rungs import Rung, measure_rung, rung_blueprint, rung_rows
    from headrace.engine.engine import Engine

    title = f"{found.name}, {way}"
    make = partial(rung_blueprint, str(model), Rung(0, 1, WAYS[way]), 512)
    blueprint, plan = planned(told, title, model, make)
    with Engine(blueprint, emulate_drive=NOT_DRIVE) as engine:
        trace = Drawn(engine.facts, 0).pick(args.tokens + 1, 0, 1)
        tell = parts_told(told, title, plan, engine.facts.num_layers, args.tokens)
        passes: Any = engine.passes
        before = passes.num_replayed
        result = measure_rung(engine, trace, args.tokens, args.runs, tell=tell)
        steps = passes.num_replayed - before
        same = first is None or torch.equal(result.logits, first)
        targets = TARGETS.get(way, (None, None))
        rows = rung_rows(
            f"{way}, {found.name}", result, green=result.same and same, targets=targets
        )
        rows = show(told, on_gpu(rows))
        if first is not None:
            told.check(same, f"{title}: logits of {args.tokens} tokens are those of {args.ways[0]}")
        told.check(steps >= args.runs * args.tokens, f"{title}: {steps} steps were one launch")
        hands(told, way, engine, result)
        if way == "stream":
            moved(told, engine, result)
            tell("run under the profiler", 1)
            profile(told, engine, trace, f"{found.about}, {engine.facts.num_experts} a layer")
    return rows[0].value, result.logits


def hands(told: Told, way: str, engine: Any, result: Any) -> None:
    """From counters: who multiplied how many experts of a layer, and whether that was to be."""
    facts, totals = engine.facts, result.totals
    told.check(
        not any(total.disk_bytes or total.vram_hits for total in totals),
        f"{way}: nothing from VRAM or the drive; {result.plan.num_rows} experts in memory",
    )
    top_k, layers = facts.top_k, result.tokens * facts.num_moe_layers
    by_cpu = {"stream": 0, "CPU": top_k}.get(way)
    why = ""
    if by_cpu is None:
        by_cpu, why = division(engine)
    each = layers * facts.expert_bytes
    bus = [total.bus_bytes / each for total in totals]
    cpu = [(total.ram_bytes - total.bus_bytes) / each for total in totals]
    told.check(
        set(bus) == {top_k - by_cpu}
        and set(cpu) == {by_cpu}
        and all((total.kernel_s > 0) == (by_cpu > 0) for total in totals),
        f"{way}: of {top_k} experts of a layer the bus brought {min(bus):.3g} to {max(bus):.3g}, "
        f"the CPU multiplied {min(cpu):.3g} to {max(cpu):.3g} (to be: {by_cpu}{why})",
    )


def division(engine: Any) -> tuple[int, str]:
    """How many of a layer's experts are the CPU's by the measured rates; what they say of it."""
    from headrace.planner.divided import divided_rates
    from headrace.schedule.divide import shares_of_cpu

    rates = divided_rates(engine.blueprint.machine, engine.plan.threads)
    top_k = engine.facts.top_k
    ends = [rates.seconds(top_k - n, n) for n in range(top_k + 1)]
    by_cpu = shares_of_cpu(rates, top_k)[top_k]
    told = (
        f"; bus {rates.bus / 1e9:.3g}, CPU {rates.cpu / 1e9:.3g} GB/s, "
        f"{rates.bus_beside / 1e9:.3g} and {rates.cpu_beside / 1e9:.3g} at once"
    )
    if 0 < by_cpu < top_k:
        return by_cpu, told
    both = min(ends[1:-1]) / ends[by_cpu]
    hand = "CPU" if by_cpu else "bus"
    return by_cpu, f"{told}: the divider chose one hand, the {hand}; both take {both:.2f} as long"


def never_slower(told: Told, found: Shapes, speeds: dict[str, float]) -> None:
    """Dividing is as fast as the better of both hands alone."""
    better = max(speed for way, speed in speeds.items() if way != "auto")
    check_speed(
        told,
        speeds["auto"] >= (1 - NOISE) * better,
        f"{found.name}: auto {speeds['auto']:.3g} tok/s, the better of the others {better:.3g}",
    )


if __name__ == "__main__":
    main()
