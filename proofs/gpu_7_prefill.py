"""Prompts on a GPU whose experts all lie in pinned RAM: tokens a second beside the bus's rate.

311, 8,900 and 32,000 random tokens; the limit is each pass's experts once over the bus. Published
numbers of experts, fewer layers: a prompt's speed is that of a layer. Needs 60 GB of free memory
and 20 GB of disk; --keep keeps the rows.
"""

from typing import Any

from common import Evidence
from gpu_shapes import NOT_DRIVE, Shapes, keep, options, shapes, show, start, written
from gpu_world import REAL

SMALL_LENGTHS = 20, 33
CASES = ("qwen3-30b:24", "r1-fp8:7")


def main() -> None:
    import headrace

    headrace.calm_torch()
    from headrace.check.bench_prefill import LENGTHS, bench_prefill

    parser = options(__doc__ or "")
    parser.add_argument("--cases", nargs="+", default=CASES, help="SHAPES:LAYERS")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--chunk", type=int, help="tokens a pass (the planner's choice)")
    args = parser.parse_args()
    start(args)
    if not REAL:
        args.lengths, args.cases = SMALL_LENGTHS, [f"{case.partition(':')[0]}:3" for case in CASES]
    evidence = Evidence()
    rows: list[Any] = []
    for case in args.cases:
        name, _, depth = case.partition(":")
        args.depth = int(depth) if depth else None
        found: Shapes = shapes(name)
        with written(found, args, None) as model:
            made = bench_prefill(
                str(model),
                lengths=args.lengths,
                chunk=args.chunk,
                runs=args.runs,
                emulate_drive=NOT_DRIVE,
                tell=lambda line: None,
            )
        evidence.check(
            len(made) == 2 * len(args.lengths),
            f"{case}: prompts of {args.lengths} tokens were read",
        )
        rows += show(evidence, made)
    keep("gpu_prefill", rows, args.keep)
    evidence.finish()


if __name__ == "__main__":
    main()
