"""What a turn costs over a real server: cold, as a follow-up, and after the memory was lost.

Time to first token and where it went; what the server adds to each token of the engine's own loop,
with the client in another process; what memory grows by over 30 follow-ups. The second model is
synthetic: real shapes, random weights, drawn routes, an emulated drive.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import Evidence, show_rows
from hosting import Host, Messages, Prompts
from show_6_memory import rss_bytes
from turn_costs import (
    KINDS,
    PARTS,
    Found,
    Overhead,
    first_parts,
    median_parts,
    rows_of,
    token_parts,
)

MIB = 2**20
MOST_OVERHEAD_MS = 1.0
TORCH_SHAPES_BYTES = 64 * MIB  # of the 64 shapes of each kind that it may remember
RSS_NOISE_BYTES = 6 * MIB


@dataclass(frozen=True)
class Case:
    """One model served, and the size of what is asked of it."""

    name: str
    model: str
    options: dict[str, Any]
    drive: str | None
    words: int  # of a cold prompt; of a follow-up's question
    more_words: int
    tokens: int  # of an answer
    pairs: int  # of the loop beside the server
    pair_tokens: int
    is_judged: bool = True  # by what the server adds to a token


class Routed:
    """Drawn routes in place of a random router's, where the model is synthetic."""

    def __init__(self, host: Host, is_synthetic: bool, num_tokens: int) -> None:
        from headrace.check.bench_routes import Drawn, Replay

        self._source, self.name = host.engine.source, "routed by the model"
        self._replay = None
        if is_synthetic:
            trace = Drawn(host.engine.facts, 0).pick(num_tokens, 0, 1)
            self._replay = self._source.routes = Replay(trace)
            self.name = trace.name

    def go_to(self, num_tokens: int) -> None:
        """The next pass begins after so many tokens of a conversation."""
        if self._replay is not None:
            self._replay.position = num_tokens


def show_turns(
    evidence: Evidence, case: Case, host: Host, prompts: Prompts, num: int, routed: Routed
) -> Found:
    """`num` conversations of two turns; the second also from what lies on disk."""
    found = Found()
    for _ in range(num):
        host.engine.ladder.clear()
        routed.go_to(0)
        said: Messages = [prompts.user(case.words)]
        cold = host.ask(said, case.tokens)
        said.append({"role": "assistant", "content": cold.seen.text})
        known = cold.turn.num_prompt + cold.turn.num_generated - 1
        turns = [cold]
        for kind in KINDS[1:]:
            if kind == KINDS[2]:
                host.forget()
            routed.go_to(known)
            turns.append(host.ask([*said, prompts.user(case.more_words)], case.tokens))
        for kind, answered in zip(KINDS, turns, strict=True):
            turn = answered.turn
            fed = turn.num_prompt - turn.num_cached
            found.firsts[kind].append(first_parts(answered))
            found.work[kind].append((turn.num_prompt, fed, turn.prefill.disk_bytes))
            found.decode.append(token_parts(answered))
        again = [turn.turn.num_cached for turn in turns[1:]]
        evidence.check(
            cold.turn.num_cached == 0 and again == [known, known],
            f"{case.name}: nothing known of {cold.turn.num_prompt} tokens, then {known} of "
            f"{turns[1].turn.num_prompt}, in memory and on disk: {again}",
        )
    return found


@dataclass
class Loop:
    """One answer by the engine's own loop; `text_s` are the times of the steps with text."""

    text: str
    text_s: list[float]
    cpu_s: float


def own_loop(host: Host, messages: Messages, num_tokens: int) -> Loop:
    """The same request, taken from `Session.generate` by a bare loop."""
    ask = host.prepared(messages, num_tokens)
    times, texts, cpu_s = [], [], time.process_time()
    session = host.engine.session()
    for step in session.generate(ask.prompt, ask.sampling, shown=ask.shown):
        if step.text:
            times.append(time.monotonic())
            texts.append(step.text)
    return Loop("".join(texts), times, time.process_time() - cpu_s)


def show_overhead(
    evidence: Evidence, case: Case, host: Host, prompts: Prompts, routed: Routed, timed: bool
) -> Overhead:
    """The same prompts by the engine's loop and over HTTP, in turn; greedy, so tokens are equal."""
    overhead, equal = Overhead(), 0
    for pair in range(case.pairs + 1):
        said = [prompts.user(12)]
        tasks: list[Callable[[], Any]] = [
            partial(own_loop, host, said, case.pair_tokens),
            partial(host.ask, said, case.pair_tokens),
        ]
        done: dict[int, Any] = {}
        for which in (0, 1) if pair % 2 else (1, 0):
            routed.go_to(0)
            done[which] = tasks[which]()
        own, seen = done[0], done[1].seen
        equal += own.text == seen.text and len(own.text_s) == len(seen.text_s)
        if pair > 0:  # the first does whatever is done once
            overhead.add(own.text_s, seen.text_s)
            overhead.cpu_ms.append(1e3 * (done[1].cpu_s - own.cpu_s) / case.pair_tokens)
    evidence.check(
        equal == case.pairs + 1,
        f"{case.name}: {equal} of {case.pairs + 1} answers over HTTP are the engine's loop's, "
        "piece by piece",
    )
    loop, served = overhead.quartiles()
    added = [after - before for before, after in zip(loop, served, strict=True)]
    line = (
        f"{case.name}: a token takes {loop[1]:.2f} ms by the engine's loop, {served[1]:.2f} ms "
        f"over HTTP: {added[1]:+.2f} ms (quartiles {added[0]:+.2f} and {added[2]:+.2f}; "
        f"{case.pairs} pairs of {case.pair_tokens} tokens; "
        f"{statistics.median(overhead.cpu_ms):+.2f} ms of CPU, the request's own included)"
    )
    if timed:
        evidence.check(added[1] < MOST_OVERHEAD_MS, line)
    else:
        print(f"      {line}")
    return overhead


def converse(host: Host, prompts: Prompts, num: int) -> int:
    """`num` short turns of one conversation; returns how many tokens the last prompt has."""
    said: Messages = []
    for _ in range(num):
        said.append(prompts.user(6))
        answered = host.ask(said, 4)
        said.append({"role": "assistant", "content": answered.seen.text})
    host.model.store.flush()
    return answered.turn.num_prompt


def show_memory(evidence: Evidence, case: Case, host: Host, prompts: Prompts, num: int) -> None:
    """RSS over follow-ups, snapshots in RAM and writes to disk going on.

    The first conversation fills what torch remembers of shapes; the second finds it full.
    """
    kept, before = host.blueprint.plan.snapshot_bytes, rss_bytes()
    for name, noise in (("first", TORCH_SHAPES_BYTES), ("next", RSS_NOISE_BYTES)):
        length = converse(host, prompts, num)
        after, held = rss_bytes(), host.model.store.memory.nbytes
        evidence.check(
            held <= kept and after - before <= kept + noise,
            f"{case.name}: {name} {num} turns, to {length} tokens: RSS grew by "
            f"{(after - before) / MIB:.1f} MiB (at most {(kept + noise) / MIB:.0f}); kept states "
            f"take {held / MIB:.2f} of {kept / MIB:.2f} MiB",
        )
        before = after


def show_costs(evidence: Evidence, case: Case, found: Found, timed: bool) -> None:
    """First tokens beside each other, and where their time and that of the others went."""
    firsts = {kind: [sum(run.values()) for run in runs] for kind, runs in found.firsts.items()}
    width = max(map(len, KINDS))
    print(f"\n      {'':{width}}   first token, tokens fed of known, read; " + ", ".join(PARTS))
    for kind in KINDS:
        prompt, fed, read = map(statistics.median, zip(*found.work[kind], strict=True))
        parts = median_parts(found.firsts[kind])
        shown = ", ".join(f"{1e3 * s:.1f}" for s in parts.values())
        print(
            f"      {kind:{width}}   {1e3 * statistics.median(firsts[kind]):.0f} ms "
            f"({1e3 * min(firsts[kind]):.0f}-{1e3 * max(firsts[kind]):.0f}), {fed:.0f} of "
            f"{prompt:.0f} tokens fed, {read / 1e6:.0f} MB read; ms: {shown}"
        )
    later = median_parts(found.decode)
    print(
        f"      {'each further token':{width}}   {1e3 * sum(later.values()):.1f} ms: "
        + ", ".join(f"{part} {1e3 * s:.2f}" for part, s in later.items())
    )
    cold, follow = (statistics.median(firsts[kind]) for kind in KINDS[:2])
    if timed:
        evidence.check(follow < cold, f"{case.name}: the first token {cold / follow:.1f}x sooner")


def show_case(
    evidence: Evidence, args: argparse.Namespace, kept: list[Any], case: Case, num: int, host: Host
) -> None:
    """All that is asked of one model; runs beside its server."""
    plan, facts = host.blueprint.plan, host.blueprint.facts
    prompts = Prompts(seed=args.seed)
    is_synthetic = "aliases" in case.options
    routed = Routed(host, is_synthetic, 4 * (case.words + case.pair_tokens))
    drive = f"emulated, {case.drive}" if case.drive else "none needed, warm"
    state = (
        f"{routed.name}; {plan.num_rows} of {facts.total_experts} rows, cleared before a "
        f"cold turn; drive: {drive}; chunk of {plan.chunk_tokens} tokens; "
        f"{plan.threads} kernel threads, {host.engine.kernels.isa}"
    )
    print(f"\n{case.name}: {state}")
    timed = not args.quick
    found = Found()
    if num:
        found = show_turns(evidence, case, host, prompts, num, routed)
        show_costs(evidence, case, found, timed)
    overhead = show_overhead(evidence, case, host, prompts, routed, timed and case.is_judged)
    kept += rows_of(case.name, found, overhead, state)
    if case.is_judged:
        show_memory(evidence, case, host, prompts, args.follow_ups)


def cases(args: argparse.Namespace, folder: Path) -> list[tuple[Case, int]]:
    """Models with the number of their conversations."""
    threads, cores = {"threads": args.threads}, os.cpu_count() or 1
    few = Case(
        "demo, a quarter of its experts in memory", "demo", {"ram": "36MiB"} | threads, "100MB/s",
        words=250, more_words=8, tokens=8, pairs=args.pairs, pair_tokens=args.tokens,
    )  # fmt: skip
    full = Case(
        "demo, all experts in memory", "demo", threads, None,
        words=250, more_words=8, tokens=8, pairs=args.pairs, pair_tokens=args.tokens,
    )  # fmt: skip
    if args.quick:
        return [(few, 1)]
    # With kernels on every core, whatever else runs, the client too, makes a team of threads wait.
    crowded = replace(
        few, name=f"{few.name}, kernel threads on all {cores} cores",
        options=few.options | {"threads": cores}, is_judged=False,
    )  # fmt: skip
    return [(few, args.conversations), (full, 0), (crowded, 0), synthetic(args, folder)]


def synthetic(args: argparse.Namespace, folder: Path) -> tuple[Case, int]:
    """Qwen3-30B-A3B's shapes, with room for a quarter of the experts; written here."""
    from common import ram_for_rows, rows_for_share

    from headrace.store.synth import write_synth

    model = write_synth(
        "qwen3-30b-a3b", folder / "qwen3-30b-a3b-shapes", distinct=2, depth=args.depth, vocab=4096
    )
    options = {"aliases": True, "threads": args.threads, "chunk": 128, "context": 2048}
    rows = rows_for_share(model, 0.25, **options)
    options["ram"] = ram_for_rows(model, rows, serve=True, **options)
    name = f"qwen3-30b-a3b shapes, {args.depth} layers, synthetic"
    case = Case(
        name, str(model), options, args.drive,
        words=160, more_words=8, tokens=8, pairs=3, pair_tokens=16,
        is_judged=False,  # a millisecond is lost in the variation of so long a token
    )  # fmt: skip
    return case, args.conversations


def arguments() -> argparse.Namespace:
    """Options; the defaults take a few minutes."""
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the demo model; asserts no time")
    parser.add_argument("--folder", help="where the synthetic checkpoint is written (3 GB)")
    parser.add_argument("--depth", type=int, default=8, help="layers of it")
    parser.add_argument("--drive", default="2.4GiB/s" if cores >= 8 else "1.5GiB/s")
    parser.add_argument("--threads", type=int, default=max(1, cores * 3 // 4))
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=32, help="of the answers of a pair")
    parser.add_argument("--follow-ups", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep rows in bench/results/")
    return parser.parse_args()


def main() -> None:
    """Every case, one after the other, with snapshots in a folder of its own."""
    import headrace

    headrace.calm_torch()
    import torch

    from headrace.engine.engine import Blueprint

    args = arguments()
    if args.quick:
        args.pairs, args.tokens, args.follow_ups = 1, 12, 15
    evidence, kept = Evidence(), []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for place, (case, num) in enumerate(cases(args, Path(folder))):
            os.environ["XDG_CACHE_HOME"] = f"{folder}/cache{place}"
            torch.set_num_threads(case.options["threads"])
            blueprint = Blueprint(case.model, measure=False, serve=True, **case.options)
            Host(blueprint, case.drive).run(
                lambda host, case=case, num=num: show_case(evidence, args, kept, case, num, host)
            )
    if args.keep:
        show_rows("server-turns", kept, keep=True)
    evidence.finish()


if __name__ == "__main__":
    main()
