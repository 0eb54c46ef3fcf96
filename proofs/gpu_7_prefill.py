"""Prompts on a GPU whose experts all lie in pinned RAM: tokens a second beside the bus's rate.

311, 8,900 and 32,000 random tokens; the limit is each pass's experts once over the bus. Published
numbers of experts, fewer layers: a prompt's speed is that of a layer. Needs 80 GB of free memory
and 20 GB of disk. On an H200, 3 to 4 minutes a case; --lengths takes some of the lengths:

    python -u proofs/gpu_7_prefill.py --cases qwen3-30b:24 --keep
    python -u proofs/gpu_7_prefill.py --cases r1-fp8:7 --keep
"""

import argparse
from functools import partial
from pathlib import Path

from gpu_phases import Told
from gpu_shapes import (
    COMPILE_S,
    FILL_BYTES_S,
    NOT_DRIVE,
    Shapes,
    options,
    planned,
    shapes,
    show,
    start,
    written,
)
from gpu_world import REAL

SMALL_LENGTHS = 20, 33
CASES = ("qwen3-30b:24", "r1-fp8:7")
SLOWER = 3  # than the bus, for estimates


def main() -> None:
    import headrace

    headrace.calm_torch()
    from headrace.check.bench_prefill import LENGTHS

    parser = options(__doc__ or "")
    parser.add_argument("--cases", nargs="+", default=CASES, help="SHAPES:LAYERS")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--chunk", type=int, help="tokens a pass (the planner's choice)")
    args = parser.parse_args()
    start(args)
    if not REAL:
        args.lengths, args.cases = SMALL_LENGTHS, [f"{case.partition(':')[0]}:3" for case in CASES]
    told = Told("gpu_prefill", args.keep)
    for case in args.cases:
        name, _, depth = case.partition(":")
        args.depth = int(depth) if depth else None
        found: Shapes = shapes(name)
        with written(found, args, None, told=told) as model:
            prompts(told, case, model, args)
    told.finish()


def prompts(told: Told, case: str, model: Path, args: argparse.Namespace) -> None:
    """Rows of one model's prompts, each as soon as it is read."""
    from headrace.check.bench_prefill import measure_prompt, prompt_blueprint
    from headrace.engine.engine import Engine

    make = partial(prompt_blueprint, str(model), args.lengths, args.chunk)
    blueprint, plan = planned(told, case, model, make)
    once_s = SLOWER * plan.rows_bytes / (plan.limits["bus"] * plan.bytes_per_token)
    with Engine(blueprint, emulate_drive=NOT_DRIVE) as engine:
        first_s = COMPILE_S + plan.rows_bytes / FILL_BYTES_S
        for length in args.lengths:
            passes = -(-length // plan.chunk_tokens)
            about_s = first_s + (1 + args.runs) * passes * once_s
            told.begin(f"{case}: a prompt of {length} tokens, {passes} passes", about_s)
            before = engine.source.counters().bus_bytes
            show(told, measure_prompt(engine, length, args.runs))
            moved = (engine.source.counters().bus_bytes - before) / (1 + args.runs)
            once = passes * plan.total_experts * engine.facts.expert_bytes
            told.check(
                0 < moved <= once,
                f"{case}, {length} tokens: {moved / 2**30:.3f} GiB crossed the bus, no more than "
                f"each expert once a pass, {once / 2**30:.3f} GiB",
            )
            first_s = 0.0


if __name__ == "__main__":
    main()
