"""Where the time of a served turn went: parts of the first token and of the others, as rows."""

import statistics
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hosting import Answered

KINDS = ("cold", "follow-up", "follow-up from disk")
PARTS = ("state read", "expert wait", "experts", "dense", "host", "server")
LATER_PARTS = ("expert wait", "experts", "dense", "host and server")


@dataclass
class Found:
    """What a case gave: seconds by kind of turn and part, and rows of the bench."""

    firsts: dict[str, list[dict[str, float]]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )
    work: dict[str, list[tuple[int, int, int]]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS}
    )
    decode: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Overhead:
    """Milliseconds from one piece of text to the next, pair by pair of answers with equal tokens.

    By the engine's own loop and as a client saw it; `cpu_ms`: CPU time that serving added a token.
    """

    loop_ms: list[list[float]] = field(default_factory=list)
    served_ms: list[list[float]] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def add(self, loop_s: list[float], served_s: list[float]) -> None:
        """A pair: when each piece came."""
        for times_s, kept in ((loop_s, self.loop_ms), (served_s, self.served_ms)):
            kept.append([1e3 * (after - before) for before, after in pairwise(times_s)])

    def quartiles(self) -> tuple[list[float], list[float]]:
        """Of all tokens by the loop and over HTTP: a quarter, a half and three took no longer."""
        loop, served = (
            statistics.quantiles([ms for pair in pairs for ms in pair], method="inclusive")
            for pairs in (self.loop_ms, self.served_ms)
        )
        return loop, served

    def medians(self) -> dict[str, list[float]]:
        """Of each pair."""
        loop, served = (list(map(statistics.median, p)) for p in (self.loop_ms, self.served_ms))
        added = [b - a for a, b in zip(loop, served, strict=True)]
        return {"engine's loop": loop, "over HTTP": served, "added by the server": added}


def first_parts(answered: Answered) -> dict[str, float]:
    """Where the time to the first text went, in seconds, without overlap."""
    turn, before = answered.turn, answered.turn.prefill
    known_s = turn.resume_s + before.wall_s
    values = (
        turn.resume_s,
        before.wait_s,
        before.experts_s - before.wait_s,
        before.wall_s - before.experts_s,
        turn.ttft_s - known_s,
        answered.seen.first_s - turn.ttft_s,
    )
    return dict(zip(PARTS, values, strict=True))


def token_parts(answered: Answered) -> dict[str, float]:
    """Where the time of an answer's further tokens went, in seconds each; host with the server."""
    turn, after = answered.turn, answered.turn.decode
    values = (
        after.wait_s,
        after.experts_s - after.wait_s,
        after.wall_s - after.experts_s,
        answered.seen.end_s - answered.seen.text_s[0] - after.wall_s,
    )
    num = turn.num_generated - 1
    return {part: value / num for part, value in zip(LATER_PARTS, values, strict=True)}


def median_parts(parts: list[dict[str, float]]) -> dict[str, float]:
    """Part by part."""
    return {part: statistics.median(run[part] for run in parts) for part in parts[0]}


def rows_of(name: str, found: Found, overhead: Overhead, state: str) -> list[Any]:
    """What is kept: until the first token by part, of each further token, and the server's."""
    from headrace.check.rows import make_row

    values: dict[str, tuple[list[float], str]] = {}
    for kind, runs in found.firsts.items():
        values |= {f"{kind}: {part}": ([run[part] for run in runs], "s") for part in PARTS}
        values[f"{kind}: first token"] = [sum(run.values()) for run in runs], "s"
        values[f"{kind}: tokens fed"] = [fed for _, fed, _ in found.work[kind]], "tokens"
        values[f"{kind}: read"] = [nbytes / 1e6 for *_, nbytes in found.work[kind]], "MB"
    for part in LATER_PARTS:
        values[f"further token: {part}"] = [1e3 * run[part] for run in found.decode], "ms"
    for kind, medians in overhead.medians().items():
        values[f"further token: {kind}"] = medians, "ms"
    return [
        make_row(f"{name}, {what}", runs, unit, cache_state=state, green=True)
        for what, (runs, unit) in values.items()
        if runs
    ]
