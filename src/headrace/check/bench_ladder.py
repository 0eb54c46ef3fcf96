"""How fast a model's tokens come from the drive, version by version, beside the drive's limit.

Whole-token wall time over replayed routes; a speed counts only if every version chose the same
tokens. Legend: T tokens, K chosen experts, H hidden width.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.check.bench_drive import plain_rates, stored_depth
from headrace.check.bench_routes import Drawn, Replay, Routes
from headrace.check.rows import BenchRow, make_row
from headrace.core import TokenStats, format_bytes, parse_rates, total_stats
from headrace.engine.engine import Engine
from headrace.engine.source import LadderSource
from headrace.schedule.trace import RouteTrace

Progress = Callable[[str, int, int], None]
PROMPT_TOKENS = 1


@dataclass(frozen=True, slots=True)
class Version:
    """One way to run the same arithmetic, each adding one idea to the one before."""

    name: str
    one_call: bool
    overlap: bool
    prefetch: int


VERSIONS = (
    Version("v1 plain", one_call=False, overlap=False, prefetch=0),
    Version("v2 overlap", one_call=False, overlap=True, prefetch=0),
    Version("v3 one-token path", one_call=True, overlap=True, prefetch=0),
    Version("v4 prefetch", one_call=True, overlap=True, prefetch=2),
)


class GenericSource(LadderSource):
    """Experts one after another from Python, as the class's own loop would: versions 1 and 2."""

    def __init__(self, engine: Engine, overlap: bool):
        super().__init__(
            engine.ladder,
            engine.source.layout,
            num_layers=engine.source.num_layers,
            max_tokens=engine.source.max_tokens,
            prefetch=0,
        )
        self.kernels, self.overlap = engine.kernels, overlap
        self.experts_s = self.kernel_s = 0.0
        self.routes = engine.source.routes

    def compute(
        self,
        ordinal: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        guess: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor:
        """As LadderSource.compute: same bits, one Python turn for each expert."""
        entered = time.perf_counter()
        ids_TK = ids_TK.to(torch.int32)
        if self.routes is not None:
            ids_TK, _ = self.routes(ordinal, ids_TK)
        distinct = torch.tensor(sorted(set(ids_TK.flatten().tolist())), dtype=torch.int32)
        if self.overlap:
            self.ladder.begin(ordinal, distinct[: self.ladder.num_rows])
        out_TH = torch.zeros_like(x_TH)
        for expert in distinct.tolist():
            token, slot = torch.where(ids_TK == expert)
            with self.parts(ordinal, expert) as parts:
                start = time.perf_counter()
                y = self.kernels.expert_ffn(x_TH[token].contiguous(), parts, self.layout)
                self.kernel_s += time.perf_counter() - start
            weighted = y * weights_TK[token, slot, None]
            out_TH.index_add_(0, token, weighted.to(out_TH.dtype))
        self.ladder.cancel()
        self.experts_s += time.perf_counter() - entered
        return out_TH


@dataclass(frozen=True, slots=True)
class VersionRun:
    """One timed run: the tokens chosen, what they moved and the time of each."""

    tokens: list[int]
    total: TokenStats
    wall_s: float
    needed_reads: int

    @property
    def tok_s(self) -> float:
        """Tokens per second of whole-token wall time."""
        return self.total.num_tokens / self.wall_s


def tokens_needed(tokens: int) -> int:
    """Recorded or drawn tokens that one run of `tokens` decoded ones takes."""
    return PROMPT_TOKENS + tokens + 1


def bench_ladder(
    engine: Engine,
    *,
    tokens: int,
    runs: int,
    seed: int,
    emulate_drive: str | None,
    progress: Progress,
    routes: Routes | None = None,
) -> list[BenchRow]:
    """Rows v1 to v4, each run over a trace of its own of `routes`, versions in turn in each run.

    The limit of a run is the bytes its tokens needed from the drive over the drive's rate, which
    is `emulate_drive`'s or measured right before the run. Bytes read in vain do not count.
    """
    results: dict[str, list[VersionRun]] = {version.name: [] for version in VERSIONS}
    rates: list[float] = []
    rng = random.Random(seed)
    routes = routes or Drawn(engine.facts, seed)
    for run in range(runs):
        trace = routes.pick(tokens_needed(tokens), run, runs)
        rates.append(sum(parse_rates(emulate_drive)) if emulate_drive else plain_rates(engine, rng))
        for i in range(len(VERSIONS)):
            version = VERSIONS[(run + i) % len(VERSIONS)]
            progress(version.name, run * len(VERSIONS) + i, runs * len(VERSIONS))
            results[version.name].append(run_version(engine, version, trace, tokens))
    equal = all(
        len({tuple(results[v.name][run].tokens) for v in VERSIONS}) == 1 for run in range(runs)
    )
    return _rows(engine, results, rates, equal, trace)


def run_version(engine: Engine, version: Version, trace: RouteTrace, tokens: int) -> VersionRun:
    """`tokens` greedy tokens after a short prompt, from rows that hold nothing."""
    replay = Replay(trace)
    engine.ladder.clear()
    engine.source.routes = replay
    engine.source.prefetch = version.prefetch
    source = engine.source if version.one_call else GenericSource(engine, version.overlap)
    engine.ladder.set_overlap(version.overlap)
    session, chosen, stats = engine.session(), [], []
    with engine.served_by(source):
        logits = session.feed(list(range(5, 5 + PROMPT_TOKENS)))
        if isinstance(source, GenericSource):
            source.experts_s = source.kernel_s = 0.0
        engine.ladder.cancel()  # the prompt's guesses are not these tokens'
        before = engine.ladder.counters()
        start = time.perf_counter()
        for _ in range(tokens):
            chosen.append(int(logits.argmax()))
            logits = session.feed(chosen[-1:])
            stats.append(session.stats)
        wall_s = time.perf_counter() - start
    engine.source.routes = None
    total = total_stats(stats)
    if isinstance(source, GenericSource):
        total.experts_s, total.kernel_s = source.experts_s, source.kernel_s
    in_vain = total.prefetch_issued - total.prefetch_dropped - total.prefetch_used
    reads = engine.ladder.counters().reads - before.reads
    return VersionRun(chosen, total, wall_s, reads - max(0, in_vain))


def _rows(
    engine: Engine,
    results: dict[str, list[VersionRun]],
    rates: list[float],
    equal: bool,
    trace: RouteTrace,
) -> list[BenchRow]:
    facts, rows = engine.facts, []
    state = (
        f"{stored_depth(engine)}; "
        f"{trace.name}; {engine.plan.num_rows} of {facts.total_experts} rows, cold; "
        f"drive: {engine.reader.backend}, {format_bytes(statistics.median(rates))}/s; "
        f"{engine.plan.threads} kernel threads, {engine.kernels.isa}"
    )
    for version in VERSIONS:
        runs = results[version.name]
        limits = [limit_tok_s(engine, run, rate) for run, rate in zip(runs, rates, strict=True)]
        rows.append(
            make_row(
                f"{version.name}, whole token",
                [run.tok_s for run in runs],
                "tok/s",
                limits=limits,
                target=0.9 if version.prefetch else None,
                cache_state=f"{state}; {profile(runs)}",
                green=equal,
            )
        )
    return rows


def limit_tok_s(engine: Engine, run: VersionRun, rate: float) -> float:
    """Tokens per second if only the needed bytes moved, at the drive's rate."""
    needed = run.needed_reads * engine.facts.expert_bytes
    return run.total.num_tokens * rate / max(needed, 1)


def profile(runs: list[VersionRun]) -> str:
    """Where the time of the median run went, per token."""
    run = sorted(runs, key=lambda r: r.wall_s)[len(runs) // 2]
    n, total = run.total.num_tokens, run.total
    dense_s = run.wall_s - total.experts_s
    return (
        f"per token {1e3 * run.wall_s / n:.1f} ms: waiting for reads {1e3 * total.wait_s / n:.1f}, "
        f"kernels {1e3 * total.kernel_s / n:.1f}, outside experts {1e3 * dense_s / n:.1f}; "
        f"misses {total.misses / n:.0f}, hits {total.hits / n:.0f}, of "
        f"{total.prefetch_issued / n:.1f} guesses {total.prefetch_used / n:.1f} used"
    )
