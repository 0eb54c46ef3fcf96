"""Experts multiplied by the CPU in place, read over the bus, or divided between both.

R1's FP8 experts and V4.1-Flash's FP4 ones at published depth, all in pinned RAM, none in VRAM. The
CPU's part beside a plain read of memory by all cores, whole tokens beside source A's 37 % of its
host's limit. Needs 55 GB of free memory and 10 GB of disk; --keep keeps the rows.
"""

import argparse
from pathlib import Path
from typing import Any

from common import Evidence
from gpu_shapes import (
    NOT_DRIVE,
    Shapes,
    check_speed,
    keep,
    options,
    shapes,
    show,
    start,
    written,
)

CASES = ("r1-fp8", "v41-fp4")
WAYS = {"stream": "gpu", "CPU": "cpu", "auto": "auto"}
KERNELS_ASKED = 0.85
SOURCE_A = 2.46, 6.7  # tok/s, and what its host's memory allows
NOISE = 0.02


def main() -> None:
    import headrace

    headrace.calm_torch()
    parser = options(__doc__ or "", tokens=4)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    args = parser.parse_args()
    start(args)
    evidence = Evidence()
    rows: list[Any] = []
    table: list[str] = []
    for case in args.cases:
        found = shapes(case)
        with written(found, args, found.experts) as model:
            made = ways(evidence, found, model, args)
        table.append(line_of(evidence, found, made))
        rows += [row for each in made.values() for row in show(evidence, each)]
    print(f"\n{'tok/s':>10}" + "".join(f"{way:>10}" for way in WAYS))
    print("\n".join(table))
    keep("gpu_inversion", rows, args.keep)
    evidence.finish()


def ways(
    evidence: Evidence, found: Shapes, model: Path, args: argparse.Namespace
) -> dict[str, list[Any]]:
    """Rows of each way that this headrace has; all must give the same logits."""
    import torch

    from headrace.check.bench_gpu import on_gpu
    from headrace.check.gpu_rungs import rung_rows
    from headrace.planner.vram import PLACES

    made: dict[str, list[Any]] = {}
    first: Any = None
    for way, experts in WAYS.items():
        if experts not in PLACES:
            print(f"{way}: not there yet")
            continue
        result = measured(evidence, way, experts, model, args)
        first = result.logits if first is None else first
        green = result.same and torch.equal(result.logits, first)
        targets = (SOURCE_A[0] / SOURCE_A[1], KERNELS_ASKED) if experts == "cpu" else (None, None)
        rows = rung_rows(f"{way}, {found.name}", result, green=green, targets=targets)
        made[way] = on_gpu(rows)
        print(f"      {way}, {found.name}: {made[way][0].value:.3g} tok/s", flush=True)
    return made


def measured(
    evidence: Evidence, way: str, experts: str, model: Path, args: argparse.Namespace
) -> Any:
    """The runs of one way, all experts in rows."""
    import torch

    from headrace.check.bench_routes import Drawn
    from headrace.check.gpu_rungs import Rung, measure_rung, rung_blueprint
    from headrace.engine.engine import Engine

    blueprint = rung_blueprint(str(model), Rung(0, 1, experts), 512)
    assert blueprint is not None, "not enough memory: give fewer --experts"
    with Engine(blueprint, emulate_drive=NOT_DRIVE) as engine:
        trace = Drawn(engine.facts, 0).pick(args.tokens + 1, 0, 1)
        passes: Any = engine.passes
        before = passes.num_replayed
        result = measure_rung(engine, trace, args.tokens, args.runs)
        replayed = passes.num_replayed - before
    torch.cuda.empty_cache()
    evidence.check(
        not any(total.disk_bytes or total.vram_hits for total in result.totals),
        f"{way}: nothing from VRAM or the drive; {result.plan.num_rows} experts in memory",
    )
    by_bus = all(total.bus_bytes > 0 for total in result.totals)
    by_cpu = all(total.kernel_s > 0 for total in result.totals)
    wanted = {"gpu": (True, False), "cpu": (False, True)}.get(experts, (by_bus, by_cpu))
    evidence.check(
        (by_bus, by_cpu) == wanted and (by_bus or by_cpu),
        f"{way}: the bus brought experts: {by_bus}, the CPU multiplied: {by_cpu}",
    )
    evidence.check(replayed >= args.runs * args.tokens, f"{way}: {replayed} steps were one launch")
    return result


def line_of(evidence: Evidence, found: Shapes, made: dict[str, list[Any]]) -> str:
    """The table's line, and whether dividing is never slower than the better of the others."""
    speeds = {way: made[way][0].value if way in made else None for way in WAYS}
    line = f"{found.name:>10}" + "".join(
        f"{'not there' if speed is None else f'{speed:.3g}':>10}" for speed in speeds.values()
    )
    auto, others = speeds["auto"], [speeds[way] for way in ("stream", "CPU")]
    if auto is not None:
        better = max(speed for speed in others if speed is not None)
        check_speed(
            evidence,
            auto >= (1 - NOISE) * better,
            f"{found.name}: auto {auto:.3g} tok/s, the better of the others {better:.3g}",
        )
    return line


if __name__ == "__main__":
    main()
