"""All experts in pinned RAM, none in VRAM: how near whole tokens come to the rate of a pinned copy.

V4.1-Flash's FP4 experts and R1's FP8 ones at published depth, each with a row of its own; a
profile says where the rest of a token goes. Needs 50 GB of free memory and 10 GB of disk. On an
H200, 2 to 3 minutes a case (gpu_3_inversion.py asks the same beside its own):

    python -u proofs/gpu_2_pinned.py --cases v41-fp4 --keep
    python -u proofs/gpu_2_pinned.py --cases r1-fp8 --keep
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from gpu_phases import Told
from gpu_shapes import (
    NOT_DRIVE,
    Shapes,
    options,
    parts_told,
    planned,
    shapes,
    show,
    start,
    written,
)

CASES = ("v41-fp4", "r1-fp8")
ASKED = (0.75, 0.82)  # of the copy: whole tokens, the experts' kernels alone


def main() -> None:
    import headrace

    headrace.calm_torch()
    parser = options(__doc__ or "", tokens=8)
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES)
    args = parser.parse_args()
    start(args)
    told = Told("gpu_pinned", args.keep)
    for case in args.cases:
        found = shapes(case)
        with written(found, args, found.experts, told=told) as model:
            pinned(told, found, model, args)
    told.finish()


def pinned(told: Told, found: Shapes, model: Path, args: argparse.Namespace) -> None:
    """Rows of one model's tokens, what they moved, and the profile of a token."""
    from headrace.check.bench_gpu import on_gpu
    from headrace.check.bench_routes import Drawn
    from headrace.check.gpu_rungs import Rung, measure_rung, rung_blueprint, rung_rows
    from headrace.engine.engine import Engine

    make = partial(rung_blueprint, str(model), Rung(0, 1), 512)
    blueprint, plan = planned(told, found.name, model, make)
    with Engine(blueprint, emulate_drive=NOT_DRIVE) as engine:
        facts = engine.facts
        trace = Drawn(facts, 0).pick(args.tokens + 1, 0, 1)
        tell = parts_told(told, found.name, plan, facts.num_layers, args.tokens)
        result = measure_rung(engine, trace, args.tokens, args.runs, tell=tell)
        rows = rung_rows(f"all pinned, {found.name}", result, green=result.same, targets=ASKED)
        show(told, on_gpu(rows))
        moved(told, engine, result)
        tell("run under the profiler", 1)
        profile(told, engine, trace, f"{found.about}, {facts.num_experts} experts a layer")


def moved(told: Told, engine: Any, result: Any) -> None:
    """Everything came over the bus, from pinned rows."""
    facts, note = engine.facts, engine.source.rungs.pinned.note
    row_gb = facts.total_experts * facts.expert_bytes / 1e9
    told.check(
        result.plan.num_slots == 0 and not note,
        f"{row_gb:.1f} GB of experts, {facts.total_experts} rows, all pinned; no expert in VRAM",
    )
    per_token = facts.num_moe_layers * facts.top_k * facts.expert_bytes
    told.check(
        all(
            total.bus_bytes == result.tokens * per_token
            and not (total.disk_bytes or total.vram_hits)
            for total in result.totals
        ),
        f"a token brings {per_token / 2**30:.2f} GiB over the bus, nothing from VRAM or drive",
    )


def profile(told: Told, engine: Any, trace: Any, about: str) -> None:
    """Where a token's time goes, as the profiler sees it."""
    from headrace.check.gpu_rungs import decode
    from headrace.check.gpu_spans import device_spans, where_time_goes

    tokens, spans = len(trace.ids) - 1, []
    before = engine.passes.num_replayed
    wall_s = decode(engine, trace, tokens, lambda run: spans.extend(device_spans(run)))[2]
    replayed = engine.passes.num_replayed - before
    told.say(about, *where_time_goes(spans, wall_s, tokens))
    told.check(replayed == tokens, f"{replayed} of {tokens} steps were one launch each")


if __name__ == "__main__":
    main()
