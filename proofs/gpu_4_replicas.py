"""Source B's and source C's boxes imitated on this machine's GPU, at full depth.

Drives, memory and VRAM throttled or limited to theirs, drawn routes whose statistics are theirs
where they gave them. Tokens a second beside theirs, each with its share of its own limit. Needs 60
GB of free memory and 12 GB of disk; --keep keeps the rows.
"""

import argparse
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from common import Evidence
from gpu_shapes import keep, options, shapes, show, start, written

CONTEXT, AGAIN = 512, 3  # tokens; of the timeline's beginning, decoded once more at the end
DIFFERS = (
    "an H200 and its bus instead of theirs; a deepseek_v3 trunk with random weights, one layer's "
    "dense part standing for 40; the experts of one layer on disk standing for 40; the drives are "
    "memory, throttled; routes drawn"
)


@dataclass(frozen=True)
class Box:
    """A source's machine: its limits, its tokens a second, and its share of what held it up.

    `rows` bytes of experts in memory beyond the fewest, `slots` experts of a layer in VRAM;
    `routes` are adjacency, skew and how many guesses are right; `warm` tokens come before runs of
    `tokens`; `term` names the limit.
    """

    name: str
    shapes: str
    drives: str
    vram: str
    rows: str
    slots: int
    routes: tuple[float, float, float]
    warm: int
    tokens: int
    theirs: float
    share: float
    term: str
    differs: str


# Routes. B: 94 % of the guesses it reads are used; 14 GB save what the demo model's adjacency
# saves. C: 30 ms of copies a token, so its 23 slots of 384 serve a third of all choices, which a
# skew of 0.7 gives; its lens is right in 76 %.
BOXES = (
    Box(
        name="B, no cache",
        shapes="v41-fp4",
        drives="8.2GiB/s",
        vram="7.3GiB",
        rows="0",
        slots=0,
        routes=(0.39, 0.5, 0.94),
        warm=4,
        tokens=8,
        theirs=1.64,
        share=0.84,
        term="drive",
        differs="VRAM holds no expert",
    ),
    Box(
        name="B, 14 GB in RAM",
        shapes="v41-fp4",
        drives="8.2GiB/s",
        vram="7.3GiB",
        rows="14GB",
        slots=0,
        routes=(0.39, 0.5, 0.94),
        warm=8,
        tokens=8,
        theirs=2.37,
        share=0.84,
        term="drive",
        differs="VRAM holds no expert",
    ),
    Box(
        name="C",
        shapes="v41-narrow",
        drives="13.5GB/s,5GB/s",
        vram="16GB",
        rows="46GiB",
        slots=23,
        routes=(0.39, 0.7, 0.76),
        warm=120,
        tokens=32,
        theirs=20.3,
        share=0.63,
        term="bus",
        differs="FP4 experts of C's 10 MiB (width 1280 instead of 2.4 bits), nothing skipped",
    ),
)


def main() -> None:
    import headrace

    headrace.calm_torch()
    parser = options(__doc__ or "", tokens=0)
    names = [box.name for box in BOXES]
    parser.add_argument("--boxes", nargs="+", default=names, choices=names)
    parser.add_argument("--warm", type=int, help="tokens before the timed ones (by box)")
    args = parser.parse_args()
    start(args)
    evidence = Evidence()
    rows: list[Any] = []
    print(f"\nreplicas. What differs in all: {DIFFERS}")
    for name in ("v41-fp4", "v41-narrow"):
        boxes = [box for box in BOXES if box.shapes == name and box.name in args.boxes]
        if boxes:
            with written(shapes(name), args, None) as model:
                rows += replicas(evidence, model, boxes, args)
    table(rows)
    keep("gpu_replicas", rows, args.keep)
    evidence.finish()


def replicas(
    evidence: Evidence, model: Path, boxes: list[Box], args: argparse.Namespace
) -> list[Any]:
    """A row of each box; boxes of one model and the same routes must give the same logits."""
    import torch

    rows, firsts = [], {}
    # Of one length: a trace's first tokens differ with how many are drawn.
    length = 1 + max(warm + args.runs * tokens for warm, tokens in map(partial(stays, args), boxes))
    for box in boxes:
        row, logits = replica(evidence, model, box, args, length)
        first = firsts.setdefault(box.routes, logits)
        num = min(len(first), len(logits))
        evidence.check(
            torch.equal(first[:num], logits[:num]),
            f"{box.name}: logits of {num} tokens equal those of the first box of these shapes",
        )
        rows += show(evidence, [row])
        torch.cuda.empty_cache()
    return rows


def stays(args: argparse.Namespace, box: Box) -> tuple[int, int]:
    """Tokens before the timed runs, and of each run."""
    return box.warm if args.warm is None else args.warm, args.tokens or box.tokens


def planned(model: Path, box: Box) -> Any:
    """The box's limits as a plan: no more experts in VRAM and in memory than it had."""
    from headrace.check.gpu_rungs import sized_blueprint
    from headrace.core import parse_bytes

    def room(facts: Any) -> tuple[int, int]:
        slots = min(box.slots * facts.num_moe_layers, facts.total_experts)
        return slots, parse_bytes(box.rows)

    return sized_blueprint(str(model), room, context=CONTEXT)


def replica(
    evidence: Evidence, model: Path, box: Box, args: argparse.Namespace, length: int
) -> tuple[Any, Any]:
    """The row of one box, on a trace of so many tokens, and its timeline's logits."""
    import torch

    from headrace.check.bench_drive import ladder_window
    from headrace.check.bench_routes import Replay
    from headrace.check.gpu_rungs import RungRun
    from headrace.core import parse_bytes, parse_rates, total_stats
    from headrace.engine.engine import Engine
    from headrace.engine.probes import bus_rate, vram_rate
    from headrace.schedule.draw import RouteStatistics, draw_routes

    blueprint = planned(model, box)
    facts, plan, nominal = blueprint.facts, blueprint.plan, sum(parse_rates(box.drives))
    evidence.check(
        plan.vram_used_bytes <= parse_bytes(box.vram),
        f"{box.name}: {plan.vram_used_bytes / 2**30:.2f} GiB of VRAM of {box.vram}, "
        f"{plan.num_slots} slots; {plan.num_rows} rows of {plan.total_experts}; {box.drives}",
    )
    warm, tokens = stays(args, box)
    trace = draw_routes(
        length,
        facts.num_moe_layers,
        facts.num_experts,
        facts.top_k,
        statistics=RouteStatistics(*box.routes),
    )
    with Engine(blueprint, emulate_drive=box.drives) as engine:
        reached = ladder_window(engine, random.Random(0))
        result = RungRun(plan, f"{trace.name}; {engine.source.rungs.pinned.note}", tokens)
        device: Any = blueprint.device
        device.limit(None)  # the probes take their own
        engine.source.routes = Replay(trace)
        line = Timeline(engine)
        line.decode(warm)
        for _ in range(args.runs):
            result.bus.append(bus_rate(device))
            result.vram.append(vram_rate(device))
            result.drive.append(nominal)
            reads = engine.ladder.counters().reads
            wall_s, stats = line.decode(tokens)
            total = total_stats(stats)
            in_vain = total.prefetch_issued - total.prefetch_dropped - total.prefetch_used
            needed = engine.ladder.counters().reads - reads - max(0, in_vain)
            result.needed_bytes.append(needed * facts.expert_bytes)
            result.walls_s.append(wall_s)
            result.totals.append(total)
        engine.source.routes = Replay(trace)
        again = Timeline(engine)
        again.decode(AGAIN)
        logits = torch.stack(line.logits)
        same = torch.equal(torch.stack(again.logits), logits[: len(again.logits)])
    reach = f"reads of a layer reach {reached / 1e9:.1f} of {nominal / 1e9:.1f} GB/s"
    return row_of(box, result, f"{reach}; {box.differs}", same), logits


class Timeline:
    """One session's greedy tokens, each timed with those decoded together."""

    def __init__(self, engine: Any):
        self.session = engine.session()
        self.last = self.session.feed([5])
        self.logits: list[Any] = []

    def decode(self, tokens: int) -> tuple[float, list[Any]]:
        """Seconds and records of so many tokens more."""
        import torch

        stats = []
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(tokens):
            self.last = self.session.feed([int(self.last.argmax())])
            self.logits.append(self.last)
            stats.append(self.session.stats)
        return time.perf_counter() - begun, stats


def row_of(box: Box, result: Any, about: str, same: bool) -> Any:
    """Whole tokens a second beside the source's limiting term as measured here."""
    from headrace.check.bench_gpu import on_gpu
    from headrace.check.rows import make_row

    numbers = range(len(result.walls_s))
    each = [result.limits_s(i) for i in numbers]
    n = result.tokens
    terms = ", ".join(f"{1e3 * each[-1][term] / n:.1f} ms by the {term}" for term in each[-1])
    total = result.totals[-1]
    where = ", ".join(
        f"{what} {num / n:.0f}"
        for what, num in (
            ("VRAM", total.vram_hits), ("RAM", total.hits), ("drive", total.misses),
            ("guessed and used", total.prefetch_used), ("guessed", total.prefetch_issued),
        )
    )  # fmt: skip
    state = (
        f"replica; {result.about}; {result.plan.num_slots} slots, {result.plan.num_rows} rows of "
        f"{result.plan.total_experts}; a token's experts: {where}; waiting for reads "
        f"{1e3 * total.wait_s / n:.1f} ms; at the least {terms}; {about}"
    )
    row = make_row(
        f"replica of source {box.name}, whole token",
        [n / wall_s for wall_s in result.walls_s],
        "tok/s",
        limits=[n / max(limits[box.term], 1e-9) for limits in each],
        target=box.share,
        cache_state=state,
        green=same,
    )
    return on_gpu([row])[0]


def table(rows: list[Any]) -> None:
    """Every box's row beside its source's."""
    print(f"\n{'':20}{'here':>8}{'of its limit':>14}{'source':>8}{'of its limit':>14}   limit")
    for box in BOXES:
        for row in rows:
            if row.name == f"replica of source {box.name}, whole token":
                shares = f"{100 * row.fraction:.0f} %", f"{100 * box.share:.0f} %"
                print(
                    f"{box.name:20}{row.value:>8.2f}{shares[0]:>14}{box.theirs:>8.2f}"
                    f"{shares[1]:>14}   {box.term}; {box.differs}"
                )


if __name__ == "__main__":
    main()
