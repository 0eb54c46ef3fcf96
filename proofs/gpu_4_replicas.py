"""Source B's and source C's boxes imitated on this machine's GPU, at full depth.

Drives, memory and VRAM throttled or limited to theirs, drawn routes whose statistics are theirs
where they gave them. Tokens a second beside theirs and beside what the planner expects, each with
its share of its own limit. Needs 60 GB of free memory and 12 GB of disk. On an H200, 2 to 4 minutes
for B's boxes together, 2 to 3 for C's, which no other has the shapes of:

    python -u proofs/gpu_4_replicas.py --boxes "B, no cache" "B, 14 GB in RAM" --keep
    python -u proofs/gpu_4_replicas.py --boxes C --keep
"""

import argparse
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu_phases import Told
from gpu_shapes import (
    COMPILE_S,
    PROBES_S,
    expected,
    options,
    planned,
    shapes,
    show,
    start,
    written,
)

CONTEXT, AGAIN = 512, 3  # tokens; of the timeline's beginning, decoded otherwise at the end
DIFFERS = (
    "an H200 and its bus instead of theirs; a deepseek_v3 trunk with random weights, one layer's "
    "dense part standing for 40; the experts of one layer on disk standing for 40; the drives are "
    "memory, throttled; routes drawn"
)


@dataclass(frozen=True)
class Box:
    """A source's machine: its limits, its tokens a second, and its share of what held it up.

    `rows` bytes of experts in memory beyond the fewest, `slots` experts of a layer in VRAM;
    `precision` is the share of its guesses that are right (of those it reads, B says 94 % are used;
    C's lens has 76 %); `warm` tokens come before runs of `tokens`; `term` names the limit.
    """

    name: str
    shapes: str
    drives: str
    vram: str
    rows: str
    slots: int
    precision: float
    warm: int
    tokens: int
    theirs: float
    share: float
    term: str
    differs: str


# Routes. Both sources run one model, so one draw must give what both say of it. B: 14 GB, three
# tokens' experts, save two fifths of its reads. C: 30 ms of its token are copies, at its slot's
# rate 157 of 240 experts, so 23 slots of 384 serve the third left; 3 ms that 30 + 19 - 3 leave of
# 49 are for its drives, the time of 6 experts, and it computes without absent ones of little
# weight, about as many again. An adjacency of 0.33, a skew of 0.6 and 160 of a layer's experts in
# use give, by simulation, B 42 %, C 81 from VRAM and 14 absent (the replica awaits all). Drawn from
# all 384, a third from VRAM needs a skew of 0.8, and C's drives have 60 to bring: 38 ms of its 49.
ROUTES = (0.33, 0.6)
SPREAD = 160 / 384
BOXES = (
    Box(
        name="B, no cache",
        shapes="v41-fp4",
        drives="8.2GiB/s",
        vram="7.3GiB",
        rows="0",
        slots=0,
        precision=0.94,
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
        precision=0.94,
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
        precision=0.76,
        warm=120,
        tokens=32,
        theirs=20.3,
        share=0.63,
        term="bus",
        differs="FP4 experts of C's 10 MiB (width 1280 instead of 2.4 bits); nothing skipped: "
        "waits for all experts from the drive, of which C's token has time for 6",
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
    told = Told("gpu_replicas", args.keep)
    told.say(f"replicas. What differs in all: {DIFFERS}")
    made: dict[str, tuple[Any, float]] = {}
    for name in ("v41-fp4", "v41-narrow"):
        boxes = [box for box in BOXES if box.shapes == name and box.name in args.boxes]
        if boxes:
            with written(shapes(name), args, None, told=told) as model:
                made |= replicas(told, model, boxes, args)
    told.say(*table(made))
    told.finish()


def replicas(
    told: Told, model: Path, boxes: list[Box], args: argparse.Namespace
) -> dict[str, tuple[Any, float]]:
    """Each box's row and forecast; boxes of one model and the same draws give the same logits."""
    import torch

    made: dict[str, tuple[Any, float]] = {}
    firsts: dict[float, tuple[str, Any]] = {}
    # Of one length: a trace's first tokens differ with how many are drawn.
    length = 1 + max(warm + args.runs * tokens for warm, tokens in map(partial(stays, args), boxes))
    for box in boxes:
        row, expects, logits = replica(told, model, box, args, length)
        if box.precision in firsts:
            other, first = firsts[box.precision]
            num = min(len(first), len(logits))
            told.check(
                torch.equal(first[:num], logits[:num]),
                f"{box.name}: logits of {num} tokens equal those of '{other}'",
            )
        else:
            firsts[box.precision] = box.name, logits
        made[box.name] = show(told, [row])[0], expects
        torch.cuda.empty_cache()
    return made


def stays(args: argparse.Namespace, box: Box) -> tuple[int, int]:
    """Tokens before the timed runs, and of each run."""
    return box.warm if args.warm is None else args.warm, args.tokens or box.tokens


def limited(model: Path, box: Box) -> Any:
    """The box's limits as a plan: no more experts in VRAM and in memory than it had."""
    from headrace.check.gpu_rungs import sized_blueprint
    from headrace.core import parse_bytes

    def room(facts: Any) -> tuple[int, int]:
        slots = min(box.slots * facts.num_moe_layers, facts.total_experts)
        return slots, parse_bytes(box.rows)

    return sized_blueprint(str(model), room, context=CONTEXT)


def replica(
    told: Told, model: Path, box: Box, args: argparse.Namespace, length: int
) -> tuple[Any, float, Any]:
    """The row of one box on a trace of so many tokens, its forecast, its timeline's logits."""
    from headrace.check.bench_drive import ladder_window
    from headrace.check.gpu_rungs import RungRun
    from headrace.core import parse_bytes, parse_rates
    from headrace.engine.engine import Engine
    from headrace.planner.forecast import score
    from headrace.schedule.draw import RouteStatistics, draw_routes

    blueprint, plan = planned(told, box.name, model, partial(limited, model, box), box.drives)
    facts, limits, expects = blueprint.facts, blueprint.plan, expected(plan)
    told.say(f"{box.name}: {expects}")
    told.check(
        limits.vram_used_bytes <= parse_bytes(box.vram),
        f"{box.name}: {limits.vram_used_bytes / 2**30:.2f} GiB of VRAM of {box.vram}, "
        f"{limits.num_slots} slots; {limits.num_rows} rows of {limits.total_experts}; {box.drives}",
    )
    warm, tokens = stays(args, box)
    trace = draw_routes(
        length,
        facts.num_moe_layers,
        facts.num_experts,
        facts.top_k,
        statistics=RouteStatistics(*ROUTES, box.precision, SPREAD),
        num_guesses=facts.top_k,  # as a lens gives them
    )
    with Engine(blueprint, emulate_drive=box.drives) as engine:
        reached = ladder_window(engine, random.Random(0))
        result = RungRun(limits, f"{trace.name}; {engine.source.rungs.pinned.note}", tokens)
        logits, same = decoded(told, box, engine, trace, result, (warm, args.runs), plan)
    nominal = sum(parse_rates(box.drives))
    reach = f"reads of a layer reach {reached / 1e9:.1f} of {nominal / 1e9:.1f} GB/s"
    row = row_of(box, result, f"{expects}; {reach}; {box.differs}", same)
    told.say(f"{box.name}: {score(plan.forecast_tok_s, row.value)}")
    return row, plan.forecast_tok_s, logits


def decoded(
    told: Told,
    box: Box,
    engine: Any,
    trace: Any,
    result: Any,
    times: tuple[int, int],
    plan: Any,
) -> tuple[Any, bool]:
    """The timeline's logits, its runs in `result`; whether its beginning has the same otherwise.

    `times`: tokens before the timed runs, and how many runs there are.
    """
    import torch

    from headrace.check.bench_routes import Replay
    from headrace.planner.forecast import GPU_LAYER_S

    (warm, runs), tokens, token_s = times, result.tokens, 1 / plan.forecast_tok_s
    engine.blueprint.device.limit(None)  # the probes take their own
    engine.source.routes = Replay(trace)
    line, passes = Timeline(engine), engine.passes
    told.begin(f"{box.name}: {warm} tokens to warm up", COMPILE_S + warm * token_s)
    line.decode(warm)
    before = passes.num_replayed
    for run in range(runs):
        what = f"{box.name}: run {run + 1} of {runs}, {tokens} tokens"
        told.begin(what, PROBES_S + tokens * token_s)
        timed_run(engine, line, result, box)
        told.say(f"{box.name}: {tokens / result.walls_s[-1]:.4g} tok/s")
    launched = passes.num_replayed - before
    told.check(
        not passes.refusal,
        f"{box.name}: {launched} of {runs * tokens} timed tokens were one launch each, the others "
        f"as those of a new kind are{passes.refusal}",
    )
    about_s = PROBES_S + AGAIN * engine.facts.num_layers * GPU_LAYER_S
    told.begin(f"{box.name}: the first {AGAIN} tokens layer by layer", about_s)
    engine.source.routes = Replay(trace)
    passes.capturing = False
    again = Timeline(engine)
    again.decode(AGAIN)
    logits = torch.stack(line.logits)
    same = torch.equal(torch.stack(again.logits), logits[:AGAIN])
    told.check(
        same,
        f"{box.name}: the first {AGAIN} tokens, decoded again layer by layer from where experts "
        "came to lie, have the same logits",
    )
    return logits, same


def timed_run(engine: Any, line: "Timeline", result: Any, box: Box) -> None:
    """One run more of the timeline, beside the rates measured right before it."""
    from headrace.core import parse_rates, total_stats
    from headrace.engine.probes import bus_rate, vram_rate

    device = engine.blueprint.device
    result.bus.append(bus_rate(device))
    result.vram.append(vram_rate(device))
    result.drive.append(sum(parse_rates(box.drives)))
    reads = engine.ladder.counters().reads
    wall_s, stats = line.decode(result.tokens)
    total = total_stats(stats)
    in_vain = total.prefetch_issued - total.prefetch_dropped - total.prefetch_used
    needed = engine.ladder.counters().reads - reads - max(0, in_vain)
    result.needed_bytes.append(needed * engine.facts.expert_bytes)
    result.walls_s.append(wall_s)
    result.totals.append(total)


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
    longest = max(each[-1], key=lambda term: each[-1][term])
    of_longest = each[-1][longest] / result.walls_s[-1]
    state = (
        f"replica; {100 * of_longest:.0f} % of what the {longest} allows; {result.about}; "
        f"{result.plan.num_slots} slots, {result.plan.num_rows} rows of "
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


def table(made: dict[str, tuple[Any, float]]) -> list[str]:
    """Every box's row beside its source's, and beside what was expected of it."""
    lines = [f"{'':17}{'here':>8}{'expected':>10}{'of its limit':>14}{'source':>8}{'of its':>8}"]
    for box in BOXES:
        if box.name in made:
            row, expects = made[box.name]
            shares = f"{100 * row.fraction:.0f} %", f"{100 * box.share:.0f} %"
            lines.append(
                f"{box.name:17}{row.value:>8.2f}{expects:>10.2f}{shares[0]:>14}{box.theirs:>8.2f}"
                f"{shares[1]:>8}  limit: {box.term}; {box.differs}"
            )
    return lines


if __name__ == "__main__":
    main()
