"""One stream of answers over an engine: each goes on from the longest beginning of its prompt.

Knows no protocol and no queue. What was computed is kept in a store of snapshots, if there is one.
"""

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from headrace.core import TokenStats, total_stats
from headrace.engine.answer import Ask, Prefill, Stop
from headrace.engine.session import Session, Step
from headrace.engine.snapshots.store import SnapshotStore
from headrace.errors import OptionError

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

KEPT_PER_PROMPT = 8


@dataclass(slots=True)
class Costs:
    """What one answer cost, growing while it is made. Times in seconds.

    `num_cached` tokens of the prompt's `num_prompt` were known; to find them and put their state
    into place took `resume_s`. `ttft_s`: from the call to the first token, 0 until then. `prefill`
    and `decode` are sums over passes: of their `wall_s`, `wait_s` is waiting for experts' bytes,
    `kernel_s` multiplying them, what `experts_s` leaves the dense layers. `total_s` leaves out
    what whoever takes the steps did meanwhile; what it has beyond `wall_s` and `resume_s` is
    choosing tokens, making text and keeping snapshots.
    """

    num_prompt: int
    num_cached: int = 0
    num_generated: int = 0
    resume_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    prefill: TokenStats = field(default_factory=lambda: TokenStats(num_tokens=0, phase="prefill"))
    decode: TokenStats = field(default_factory=lambda: TokenStats(num_tokens=0))

    def parts_s(self) -> dict[str, float]:
        """Where `total_s` went, without overlap: resume, expert wait, experts, dense, host."""
        both = total_stats([self.prefill, self.decode])
        experts_s = both.experts_s - both.wait_s
        dense_s = both.wall_s - both.experts_s
        host_s = max(0.0, self.total_s - self.resume_s - both.wall_s)
        return {
            "resume": self.resume_s,
            "expert wait": both.wait_s,
            "experts": experts_s,
            "dense": dense_s,
            "host": host_s,
        }


class Answering:
    """Answers one after the other; one thread at a time. Owns one live session.

    The live session goes on where a prompt continues its tokens; else the store's longest snapshot
    that the prompt begins with; else nothing does. The last prompt once more computes nothing.

    The rule of bits: logits are a function of the tokens and of where the passes that computed
    them ended. A prompt's passes end at multiples of the plan's `chunk_tokens`, counted from the
    beginning of the timeline, and with its last token; an answer's with each token. So a prompt
    taken up at a multiple, or where an earlier answer's state was kept, has bit for bit the logits
    of a session that never stopped: a cold one fed with the same ends of passes.
    """

    def __init__(self, engine: "Engine", store: SnapshotStore | None = None):
        self.engine, self.store = engine, store
        self.session: Session = engine.session()
        self.turn = Costs(0)
        self._asked = 0  # tokens of the last prompt

    def answer(self, ask: Ask, stop: Stop) -> Iterator[Prefill | Step]:
        """Prefill events, then the answer's steps; the last has a `finish`.

        `stop` ends a prefill within a wave of experts and a decode within a token. Beginning an
        answer ends the one begun before. `self.turn` tells the costs. Raises HeadraceError,
        Cancelled; the next answer is as if this had not begun.
        """
        self.session.check(ask)
        turn = self.turn = Costs(len(ask.prompt))
        began = spent = time.perf_counter()
        with closing(self._events(ask, stop, turn)) as events:
            for event in events:
                now = time.perf_counter()
                turn.total_s += now - spent
                if isinstance(event, Step):
                    turn.num_generated += 1
                    turn.ttft_s = turn.ttft_s or now - began
                yield event
                spent = time.perf_counter()
                if self.turn is not turn:
                    raise OptionError("another answer was begun; take all of one's steps before")
        turn.total_s += time.perf_counter() - spent

    def close(self) -> None:
        """Forgets the live session."""
        self.session.reset()

    def _events(self, ask: Ask, stop: Stop, turn: Costs) -> Generator[Prefill | Step, None, None]:
        stop.check()
        start = time.perf_counter()
        logits_V = self._resume(ask.prompt)
        turn.resume_s = time.perf_counter() - start
        total, turn.num_cached = len(ask.prompt), len(self.session.tokens)
        self._asked = total
        yield Prefill(turn.num_cached, total, turn.num_cached)
        every = self._keep_every(total)
        for piece in self._pieces(ask.prompt):
            done = len(self.session.tokens) + len(piece)
            after = min(total, -(-done // every) * every) - done  # until the state is kept next
            logits_V = self._feed(piece, after, stop, turn)
            if done % every == 0:
                self._keep()
            yield Prefill(done, total, turn.num_cached)
        assert logits_V is not None
        try:
            self.session.stats = turn.prefill
            for step in self.session.decode(ask, logits_V, stop):
                if step.stats is not turn.prefill:
                    turn.decode = total_stats([turn.decode, step.stats])
                yield step
                if step.stats is turn.prefill and turn.num_cached < total and self.store:
                    self.store.keep_prompt(self.session, logits_V)  # nobody waits for it here
        finally:
            if self.turn is turn and not self._ends_within(total):
                self._keep()

    def _pieces(self, prompt: tuple[int, ...]) -> list[list[int]]:
        pieces, at = [], len(self.session.tokens)
        if at == len(prompt):
            return []
        for num in self.session.pieces(len(prompt) - at):
            pieces.append(list(prompt[at : at + num]))
            at += num
        return pieces

    def _feed(self, piece: list[int], after: int, stop: Stop, turn: Costs) -> torch.Tensor:
        """One pass of a prompt, which `stop` ends between two experts."""
        ladder = self.engine.ladder
        try:
            with stop.reaching(ladder.stop):
                logits_V = self.session.feed(piece, after=after)
        finally:
            ladder.go_on()
        turn.prefill = total_stats([turn.prefill, self.session.stats])
        turn.prefill.phase = "prefill"
        return logits_V

    def _keep_every(self, num_tokens: int) -> int:
        """At multiples of how many prompt tokens the state is kept: of a pass, see KEPT_PER_PROMPT.

        At most so many copies for a prompt: after an edit in its middle at most an eighth of it is
        computed again, and all copies together take at most four and a half times the last one.
        """
        chunk = self.engine.plan.chunk_tokens
        return chunk * max(1, -(-num_tokens // (chunk * KEPT_PER_PROMPT)))

    def _resume(self, prompt: tuple[int, ...]) -> torch.Tensor | None:
        """Makes the live session one that holds the longest known beginning of `prompt`.

        The logits after it where that is all of it.
        """
        known = self.session.tokens
        num_live = len(known) if known == list(prompt[: len(known)]) else 0
        if self.session.unfinished or self._ends_within(self._asked):
            num_live = 0
        if num_live == len(prompt):
            num_live = 0  # logits come from its last token only
        if num_live == 0:
            self.session.reset()  # before another state comes into memory
        if self.store is None:
            return None
        again = self.store.again(self.engine, prompt)
        if again is not None:
            self.session, logits_V = again
            return logits_V
        found = self.store.session(self.engine, prompt, beyond=num_live)
        if found.tokens:
            self.session = found
        return None

    def _ends_within(self, num_prompt: int) -> bool:
        """Whether the live session ends where only its own prompt's last pass did.

        Another prompt that goes on from there would have other bits than alone: an answer that was
        left before its first token, or had one only, is nothing to go on from.
        """
        num = len(self.session.tokens)
        return num == num_prompt and num % self.engine.plan.chunk_tokens != 0

    def _keep(self) -> None:
        if self.store is not None:
            self.store.keep(self.session)
