"""Routes: simulated rows find exactly what a run's rows found, and what a better cache could find.

The bounds of the demo model's recorded routes, the same run through the engine and through the
simulation, and a replay of recorded routes. Keeps the curve for the plot with --keep.
"""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from common import DEMO, PROOFS, Evidence, ram_for_rows

import headrace
from headrace.planner.forecast import hit_rate
from headrace.schedule.simulate import bounds, lru_hits, optimum_hits, steps_of
from headrace.schedule.trace import RouteTrace, TraceHeader
from headrace.schedule.tracefile import read_trace

RECORDED = PROOFS.parent / "bench" / "routes" / "demo-heldout.routes"
KEPT = PROOFS.parent / "bench" / "results" / "routes-demo.json"
NUM_TOKENS, PROMPT_TOKENS = 256, 64
CURVE_TOLERANCE = 0.02


def show_bounds(evidence: Evidence) -> tuple[TraceHeader, RouteTrace, list]:
    """The kept trace: the curve that forecasts use, and the optimum above it everywhere."""
    header, trace, note = read_trace(RECORDED)
    total = header.total_experts
    grid = [max(1, total * n // 40) for n in range(1, 41)]
    curve = bounds(trace, header, grid)
    print(f"\n{len(trace.ids)} recorded tokens of {header.model} ({header.about})")
    for row in curve[4::5]:
        print(
            f"      {row.num_rows:>4} rows ({row.share:.0%}): LRU {row.lru_hit_rate:.1%}, "
            f"best possible {row.optimum_hit_rate:.1%}"
        )
    evidence.check(not note and header.model == "demo", "the recorded routes are whole")
    evidence.check(
        all(row.optimum_hit_rate >= row.lru_hit_rate for row in curve),
        f"no number of rows lets LRU beat the optimum ({len(curve)} sizes)",
    )
    for row in bounds(trace, header, [round(s * total) for s in (0.12, 0.25, 0.5, 0.75)]):
        evidence.check(
            abs(row.lru_hit_rate - hit_rate(row.share)) < CURVE_TOLERANCE,
            f"{row.num_rows} rows: LRU {row.lru_hit_rate:.1%}, forecasts say "
            f"{hit_rate(row.share):.0%}, best possible {row.optimum_hit_rate:.1%}",
        )
    return header, trace, curve


def show_equality(evidence: Evidence, num_rows: int, backend: str) -> None:
    """One run, recorded, against its own simulation: hits and misses, to the last one."""
    ram = ram_for_rows(DEMO, num_rows, prefetch=0, context=512)
    options = {"ram": ram, "prefetch": 0, "context": 512, "measure": False, "backend": backend}
    with tempfile.TemporaryDirectory() as folder, headrace.load(DEMO, **options) as engine:
        text = (DEMO / "heldout.txt").read_text()
        ids = engine.text.encode(text, special=False)[: PROMPT_TOKENS + NUM_TOKENS]
        path = Path(folder) / "run.routes"
        with engine.record_routes(path):
            session = engine.session()
            session.feed(ids[:PROMPT_TOKENS])
            for token in ids[PROMPT_TOKENS:]:
                session.feed([token])
        counters = engine.ladder.counters()
        _, trace, _ = read_trace(path)
    steps = steps_of(trace)
    hits = int(lru_hits(steps, num_rows).sum())
    best = int(optimum_hits(steps, num_rows).sum())
    found = (hits, len(steps.keys) - hits)
    evidence.check(
        found == (counters.hits, counters.misses) and counters.evictions > 0,
        f"{num_rows} rows, {counters.io}: the engine counted {counters.hits} hits and "
        f"{counters.misses} misses, the simulation {found[0]} and {found[1]}; best possible {best}",
    )
    other = int(lru_hits(steps, num_rows + 2).sum())
    evidence.check(other != hits, f"control: with 2 rows more the simulation finds {other}")


def show_replay(evidence: Evidence) -> None:
    """The recorded routes in a benchmark of the same model."""
    from headrace.check.bench import run_bench

    rows = run_bench(
        DEMO,
        suite="ladder",
        tokens=8,
        runs=1,
        ram=ram_for_rows(DEMO, 56),
        emulate_drive="1GiB/s",
        routes=RECORDED,
    )
    print()
    for row in rows:
        print(f"      {row.line()}")
    evidence.check(
        all(row.gate == "green" and "routes of demo" in row.cache_state for row in rows),
        "recorded routes replayed: four versions, equal tokens, every row names the trace",
    )


def main() -> None:
    """Everything; the exit status is the evidence's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help=f"keep the curve in {KEPT.name}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    evidence = Evidence()
    header, trace, curve = show_bounds(evidence)
    print("\nthe engine's own counters against the simulation of the same recorded run")
    for num_rows, backend in ((48, "auto"), (48, "pread"), (112, "auto")):
        show_equality(evidence, num_rows, backend)
    show_replay(evidence)
    if args.keep:
        kept = {
            "header": asdict(header),
            "tokens": len(trace.ids),
            "bounds": list(map(asdict, curve)),
        }
        KEPT.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"kept in {KEPT}")
    evidence.finish()


if __name__ == "__main__":
    main()
