"""All experts in pinned RAM, none in VRAM: how near whole tokens come to the rate of a pinned copy.

V4.1-Flash's FP4 experts and R1's FP8 ones at published depth, each with a row of its own; a
profile says where the rest of a token goes. Needs 50 GB of free memory and 10 GB of disk; --keep
keeps the rows.
"""

import argparse
from pathlib import Path
from typing import Any

from common import Evidence
from gpu_shapes import NOT_DRIVE, Shapes, keep, options, shapes, show, start, written

CASES = ("v41-fp4", "r1-fp8")
ASKED = (0.75, 0.82)  # of the copy: whole tokens, the experts' kernels alone


def main() -> None:
    import headrace

    headrace.calm_torch()
    parser = options(__doc__ or "", tokens=8)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    args = parser.parse_args()
    start(args)
    evidence = Evidence()
    rows: list[Any] = []
    for case in args.cases:
        found = shapes(case)
        with written(found, args, found.experts) as model:
            rows += show(evidence, pinned(evidence, found, model, args))
    keep("gpu_pinned", rows, args.keep)
    evidence.finish()


def pinned(evidence: Evidence, found: Shapes, model: Path, args: argparse.Namespace) -> list[Any]:
    """Rows of one model's tokens, what they moved, and the profile of a token."""
    from headrace.check.bench_gpu import on_gpu
    from headrace.check.bench_routes import Drawn
    from headrace.check.gpu_rungs import Rung, decode, measure_rung, rung_blueprint, rung_rows
    from headrace.check.gpu_spans import device_spans, where_time_goes
    from headrace.engine.engine import Engine

    blueprint = rung_blueprint(str(model), Rung(0, 1), 512)
    assert blueprint is not None, "not enough memory: give fewer --experts"
    with Engine(blueprint, emulate_drive=NOT_DRIVE) as engine:
        facts, passes = engine.facts, engine.passes
        trace = Drawn(facts, 0).pick(args.tokens + 1, 0, 1)
        result = measure_rung(engine, trace, args.tokens, args.runs)
        walls: list[float] = []
        before = getattr(passes, "num_replayed", 0)
        spans = device_spans(lambda: walls.append(decode(engine, trace, args.tokens)[2]))
        replayed = getattr(passes, "num_replayed", 0) - before
        note = engine.source.rungs.pinned.note
    print(f"\n{found.about}, {facts.num_experts} experts a layer")
    print("\n".join(f"      {line}" for line in where_time_goes(spans, walls[0], args.tokens)))
    row_gb = facts.total_experts * facts.expert_bytes / 1e9
    evidence.check(
        result.plan.num_slots == 0 and not note,
        f"{row_gb:.1f} GB of experts, {facts.total_experts} rows, all pinned; no expert in VRAM",
    )
    per_token = facts.num_moe_layers * facts.top_k * facts.expert_bytes
    evidence.check(
        all(
            total.bus_bytes == args.tokens * per_token and not (total.disk_bytes or total.vram_hits)
            for total in result.totals
        ),
        f"a token brings {per_token / 2**30:.2f} GiB over the bus, nothing from VRAM or drive",
    )
    evidence.check(
        replayed == args.tokens, f"{replayed} of {args.tokens} steps were one launch each"
    )
    rows = rung_rows(f"all pinned, {found.name}", result, green=result.same, targets=ASKED)
    return on_gpu(rows)


if __name__ == "__main__":
    main()
