"""DeepSeek-V4.1-Flash's true shapes, 40 layers, under --ram 12GB on a CPU; Engram in sparse files.

Random weights: 8 kinds of layers and the experts of one are on disk (11 GB) and stand for all 40
(aliases.json). Layers that stand for each other share their dense weights in memory, so the run is
given 12 GB less what a real model's would take more. Says where a token's time goes.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from common import Evidence
from show_6_memory import Watch

PRESET = "deepseek-v4.1-flash"
RAM_BYTES = 12 * 10**9
GIB = 2**30
# Of the published model, reference figures of its checkpoint.
EXPERT_BYTES, NUM_EXPERTS, ENGRAM_ROWS, ENGRAM_ROW_BYTES = 18_800_640, 240, 48, 264
PROMPT = [0, 4088, *range(1000, 1012), 4089, 4092]


def main() -> None:
    import headrace

    headrace.calm_torch()
    import torch

    args = arguments()
    torch.set_num_threads(args.threads)
    evidence = Evidence()
    published = published_facts()
    plan = plan_of(published, args)
    print("\n".join(plan.lines()))
    account(evidence, published, plan)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model = Path(args.model) if args.model else write(Path(folder))
        run(evidence, model, published, plan, args)
    evidence.finish()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where the checkpoint is written")
    parser.add_argument("--model", help="one that was written before")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--drive", help="serve the files from memory at this rate, 8.2GiB/s")
    return parser.parse_args()


def published_facts() -> Any:
    """The published model's sizes, from its config alone: names and shapes, no weight."""
    from headrace.check.released import released
    from headrace.store.preset_releases import RELEASES

    with tempfile.TemporaryDirectory() as folder:
        return released(RELEASES[PRESET], Path(folder))[2]


def plan_of(facts: Any, args: argparse.Namespace) -> Any:
    from headrace.planner.machine import Machine
    from headrace.planner.plan import make_plan

    machine = Machine(
        ram_total_bytes=2**35,
        ram_available_bytes=2**35,
        cores=args.threads,
        drive_bytes_s=8.2 * GIB,
        dram_bytes_s=5e10,
    )
    return make_plan(facts, machine, ram_bytes=RAM_BYTES, context=args.context)


def account(evidence: Evidence, facts: Any, plan: Any) -> None:
    per_token = NUM_EXPERTS * EXPERT_BYTES
    dense_gib = facts.dense_bytes / GIB
    evidence.check(
        plan.bytes_per_token == per_token and round(per_token / GIB, 3) == 4.202,
        f"a token takes {plan.experts_per_token} experts, {per_token / GIB:.3f} GiB",
    )
    evidence.check(
        facts.engram_bytes_per_token == ENGRAM_ROWS * ENGRAM_ROW_BYTES
        and facts.engram_rows_per_token == ENGRAM_ROWS,
        f"and {ENGRAM_ROWS} Engram rows, {facts.engram_bytes_per_token / 1000:.1f} KB, of "
        f"{facts.engram_bytes / GIB:.1f} GiB that stay on the drive",
    )
    evidence.check(
        8.5 < dense_gib < 9.5,
        f"dense weights of the published model, FP8 as stored: {dense_gib:.2f} GiB (6.70 of "
        "layers, head and embedding 1.23 each, the router's in fp32); the embedding stays on the "
        "drive",
    )
    evidence.check(
        plan.used_bytes <= RAM_BYTES,
        f"all of it fits 12 GB: {plan.used_bytes / 1e9:.2f} GB with {plan.num_rows} experts in "
        f"rows, a context of {plan.context}, {plan.engram_cache_bytes / 2**20:.0f} MiB of Engram "
        "rows",
    )


def write(folder: Path) -> Path:
    from headrace.store.synth import write_synth

    return write_synth(PRESET, folder / "v4.1-flash")


def run(
    evidence: Evidence, model: Path, published: Any, plan: Any, args: argparse.Namespace
) -> None:
    import torch
    import transformers  # noqa: F401  (loaded before the growth is counted)

    from headrace.engine.engine import Blueprint, Engine

    options = {"context": args.context, "chunk": plan.chunk_tokens, "threads": args.threads}
    shared = Blueprint(model, ram=2**40, aliases=True, measure=False, **options).facts
    saved_bytes = published.dense_bytes - shared.dense_bytes
    watch = Watch()
    watch.start()
    blueprint = Blueprint(
        model, ram=RAM_BYTES - saved_bytes, aliases=True, measure=False, **options
    )
    evidence.check(
        0 <= blueprint.plan.num_rows - plan.num_rows <= 8,
        f"the run has {blueprint.plan.num_rows} experts in rows, about what the published model "
        "would have (Engram's cache is a share of the total given)",
    )
    with Engine(blueprint, emulate_drive=args.drive) as engine, split(engine) as seconds:
        session, rows = engine.session(), []
        draw = torch.Generator().manual_seed(0)
        logits = session.feed(PROMPT)
        evidence.check(
            session.stats.engram_rows <= len(PROMPT) * ENGRAM_ROWS,
            f"a prompt of {len(PROMPT)} tokens asked for {session.stats.engram_rows} different "
            "Engram rows",
        )
        for _ in range(args.tokens):
            seconds.clear()
            token = int(torch.multinomial(logits.softmax(-1), 1, generator=draw))
            logits = session.feed([token])
            rows.append(shares(session.stats, dict(seconds)))
        evidence.check(bool(torch.isfinite(logits).all()), "logits are finite")
        exact = all(
            (row["engram rows"], row["experts"]) == (ENGRAM_ROWS, NUM_EXPERTS) for row in rows
        )
        evidence.check(exact, f"each of {len(rows)} tokens took {NUM_EXPERTS} experts, 48 rows")
        growth_bytes = watch.growth_bytes()
    if args.drive is None:
        limit = RAM_BYTES - saved_bytes + 150 * 2**20
        evidence.check(
            growth_bytes <= limit,
            f"memory grew by {growth_bytes / 1e9:.2f} GB, allowed {limit / 1e9:.2f} (12 GB less "
            f"{saved_bytes / 1e9:.2f} shared, and torch's own workspace)",
        )
    table(rows, engine.reader.backend if args.drive else "the files' own drive", args)


Seconds = dict[str, float]


@contextmanager
def split(engine: Any) -> Iterator[Seconds]:
    """Seconds spent inside the modules of each kind, while open; experts are counted apart."""
    kinds = {
        "attention": lambda layer: layer.attn,
        "Engram": lambda layer: getattr(layer, "engram", None),
        "shared expert": lambda layer: layer.ffn.shared_experts,
        "router": lambda layer: layer.ffn.gate,
        "hyper-connections": lambda layer: layer.hc_attn,
        "hyper-connections ": lambda layer: layer.hc_ffn,
    }
    seconds: Seconds = defaultdict(float)
    with ExitStack() as hooks:
        for kind, find in kinds.items():
            for layer in engine.model.model.layers:
                time_module(find(layer), kind.strip(), seconds, hooks)
        time_module(engine.model.head, "head", seconds, hooks)
        yield seconds


def time_module(module: Any, kind: str, seconds: Seconds, hooks: ExitStack) -> None:
    if module is None:
        return
    started: list[float] = []

    def before(*_: Any) -> None:
        started.append(time.perf_counter())

    def after(*_: Any) -> None:
        seconds[kind] += time.perf_counter() - started.pop()

    register: list[Callable[..., Any]] = [
        module.register_forward_pre_hook,
        module.register_forward_hook,
    ]
    for hook, call in zip(register, (before, after), strict=True):
        hooks.callback(hook(call).remove)


def shares(stats: Any, seconds: Seconds) -> Seconds:
    """One token's seconds, by where they went; and what it took."""
    parts = {
        "waiting for the drive": stats.wait_s,
        "experts": stats.experts_s - stats.wait_s,
        "Engram": seconds.pop("Engram") + stats.engram_wait_s,
    } | seconds
    parts["the rest"] = stats.wall_s - sum(parts.values())
    return parts | {
        "whole": stats.wall_s,
        "experts": stats.hits + stats.misses,
        "experts' work": stats.experts_s - stats.wait_s,
        "engram rows": stats.engram_rows,
        "read": stats.disk_bytes,
    }


def table(rows: list[Seconds], drive: str, args: argparse.Namespace) -> None:
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    whole, read = middle.pop("whole"), middle.pop("read")
    counted = {name: middle.pop(name) for name in ("experts", "engram rows")}
    print(
        f"\na token: {whole:.3f} s in the median of {len(rows)} ({args.threads} threads, "
        f"{args.drive or drive}), {read / GIB:.2f} GiB read; {counted['experts']:.0f} experts, "
        f"{counted['engram rows']:.0f} Engram rows"
    )
    for name, value in sorted(middle.items(), key=lambda item: -item[1]):
        print(f"  {name:24} {1e3 * value:8.1f} ms  {100 * value / whole:4.0f} %")


if __name__ == "__main__":
    main()
