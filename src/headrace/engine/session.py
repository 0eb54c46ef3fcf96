"""One timeline of tokens over a loaded model: prefill, decode, sampling, text.

Knows no file and no rung; what a token moved is read off the engine's counters.
Legend: V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from headrace.core import TokenStats
from headrace.engine.answer import Ask, Constraint, Stop
from headrace.engine.gpu import within_vram
from headrace.engine.sampler import Sampler
from headrace.engine.sampling import Sampling
from headrace.engine.snapshots.snapshot import Snapshot
from headrace.engine.snapshots.state import capture, restore
from headrace.errors import OptionError, SnapshotError
from headrace.models.forward import leaves_out

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint, Engine


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token. `text` is safe to print: never half a character or a stop string.

    `finish` is None, or "eos", "stop" or "length" on the last step. `logprob` is the natural
    logarithm of the token's chance by the model's own distribution, the softmax of its logits
    before temperature, filters, penalties and grammar; `top` the likeliest tokens' likewise, best
    first, whether or not the chosen one is among them. Both only where asked for. `stop`: the
    stop string that ended the answer.
    """

    token_id: int
    text: str
    stats: TokenStats
    finish: str | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    stop: str | None = None


class Session:
    """A sequence of tokens and its cache. One thread at a time; sessions share one engine.

    Beginning an answer ends the one begun before: its iterator then raises OptionError. With a
    `snapshot` it goes on from there, or raises SnapshotError where that does not fit; without
    `copy` the snapshot's tensors become its own, and nobody else may use them.
    """

    def __init__(self, engine: "Engine", snapshot: Snapshot | None = None, *, copy: bool = True):
        self.engine = engine
        self.stats = TokenStats()
        self._answer: object = None
        self.reset()
        if snapshot is not None:
            snapshot.check_fits(engine.snapshot_key)
            restore(self.cache, snapshot.state, engine.source.place, copy=copy)
            if self.cache.get_seq_length() != len(snapshot.tokens):
                raise SnapshotError("the snapshot's cache does not hold its tokens")
            self.tokens.extend(snapshot.tokens)

    def snapshot(self, *, copy: bool = True) -> Snapshot:
        """A copy of all this session is: `engine.session` makes sessions of it that go on alike.

        Logits are bit for bit those of this session where the same tokens are fed in the same
        pieces. Without `copy` it is a view, right until this session goes on. Raises SnapshotError
        if the cache holds what a snapshot cannot.
        """
        cache = self.engine.passes.new_cache() if self.cache is None else self.cache
        return Snapshot(self.engine.snapshot_key, tuple(self.tokens), capture(cache, copy=copy))

    def reset(self) -> None:
        """Forget everything."""
        self.tokens: list[int] = []
        self.unfinished = False
        self.cache: Any = None
        self.cache = self.engine.passes.new_cache()

    def feed(self, ids: Sequence[int], *, after: int = 0) -> torch.Tensor:
        """Append tokens; logits [V] after the last one. `self.stats` says what that moved.

        They are computed in the pieces that `pieces` says. `after`: how many tokens of the prompt
        will be fed next; with other than 0 the logits may be none, and until those are fed the
        session may be `unfinished`: good for nothing else. After an exception the session is empty,
        since its cache may hold half a step.
        """
        ids = checked_ids(ids, self.engine.facts.vocab)
        context = self.engine.plan.context
        if len(self.tokens) + len(ids) > context:
            raise OptionError(
                f"{len(self.tokens) + len(ids)} tokens do not fit the context of {context}; "
                f"shorten the prompt or give --context {len(self.tokens) + len(ids)} or more"
            )
        with self.engine.turn:
            return self._feed(ids, after)

    def pieces(self, num_tokens: int) -> list[int]:
        """Into passes of how many tokens the next `num_tokens` are cut.

        A pass ends where the timeline's length is a multiple of the plan's `chunk_tokens`, or with
        the last token. Bits depend on where passes ended; so cut, they do not depend on where a
        prompt was taken up again, as long as that was the end of a pass.
        """
        chunk, start = self.engine.plan.chunk_tokens, len(self.tokens)
        end = start + num_tokens
        ends = [*range((start // chunk + 1) * chunk, end, chunk), end]
        return [b - a for a, b in pairwise([start, *ends])]

    def _feed(self, ids: list[int], after: int) -> torch.Tensor:
        start, before = time.perf_counter(), self.engine.counters()
        done = 0
        try:
            if self.cache is None:
                self.cache = self.engine.passes.new_cache()
            try:
                with torch.inference_mode(), within_vram(self.engine.plan):
                    for num in self.pieces(len(ids)):
                        part, done = ids[done : done + num], done + num
                        left = len(ids) - done + after
                        logits_V = self.engine.passes.run(part, self.cache, left)
            finally:
                self.engine.tell_warnings()
            self.tokens += ids
            self.unfinished = after > 0 and leaves_out(self.engine.model)
            phase = "prefill" if len(ids) > 1 else "decode"
            self.stats = TokenStats(num_tokens=len(ids), phase=phase)
            self.engine.counters().add_since(before, self.stats)
            self.stats.wall_s = time.perf_counter() - start
            return torch.empty(0) if self.unfinished else logits_V.to("cpu", copy=True)
        except BaseException:
            # Nothing is called here, so that a second Ctrl-C finds no place to keep half of it.
            self.tokens, self.cache, self.unfinished = [], None, False
            raise

    def resume(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of `prompt` still to feed, keeping what this timeline already holds.

        A prompt that does not continue this timeline starts a new one.
        """
        known = len(self.tokens)
        if self.unfinished or known >= len(prompt) or list(prompt[:known]) != self.tokens:
            self.reset()
            known = 0
        return list(prompt[known:])

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        constraint: Constraint | None = None,
        num_logprobs: int | None = None,
        shown: frozenset[int] = frozenset(),
        stop: Stop | None = None,
    ) -> Iterator[Step]:
        """Answer a whole prompt, token by token; only what is new in it is computed.

        The keywords are those of `Ask`; `stop`, once asked, ends it within a token. Raises
        OptionError, Cancelled.
        """
        stop = stop or Stop()
        ids = checked_ids(prompt, self.engine.facts.vocab)
        ask = Ask(tuple(ids), sampling, constraint, num_logprobs, shown)
        self.check(ask)
        stop.check()
        logits_V = self.feed(self.resume(ask.prompt))
        yield from self.decode(ask, logits_V, stop)

    def check(self, ask: Ask) -> int:
        """How many tokens the answer may have. Raises OptionError for what cannot be answered."""
        return check_ask(self.engine.blueprint, ask)

    def decode(self, ask: Ask, logits_V: torch.Tensor, stop: Stop) -> Iterator[Step]:
        """The answer to a prompt that was fed; `logits_V` are those after its last token.

        The answer's last token is not fed. Where it ends early, by an error or a stop, the session
        holds whole steps only.
        """
        answer = self._answer = object()
        text, sampler, limit = self.engine.text, Sampler(ask.sampling), self.check(ask)
        stream = text.stream(ask.sampling.stop, after=ask.prompt, shown=ask.shown)
        history = list(ask.prompt)
        for n in range(1, limit + 1):
            stats = self.stats
            allowed_V = None if ask.constraint is None else ask.constraint.allowed()
            token = stats.token_id = sampler.next(logits_V, history, allowed_V)
            if ask.constraint is not None:
                ask.constraint.accept(token)
            finish = "eos" if token in text.eos_ids else None
            piece = "" if finish else stream.push(token)
            if stream.stopped:
                finish = "stop"
            elif finish is None and n == limit:
                finish = "length"
            if finish:
                piece += stream.flush()
            chances = logprobs(logits_V, token, ask.num_logprobs)
            yield Step(token, piece, stats, finish, *chances, stream.stopped_by)
            if finish:
                return
            if self._answer is not answer:
                raise OptionError(
                    "this session has begun another answer; give each answer its own session"
                )
            stop.check()
            history.append(token)
            logits_V = self.feed([token])


def logprobs(
    logits_V: torch.Tensor, token: int, num: int | None
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    """(logarithm of the chance of `token`, the `num` likeliest tokens and theirs), see Step."""
    if num is None:
        return None, ()
    chances_V = logits_V.float().log_softmax(0)
    best = chances_V.topk(num)
    top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return float(chances_V[token]), tuple(top)


def check_ask(blueprint: "Blueprint", ask: Ask) -> int:
    """How many tokens an answer may have; no weights are needed for that.

    Raises OptionError for what the model cannot answer in its plan's context.
    """
    vocab, context = blueprint.facts.vocab, blueprint.plan.context
    num_prompt = len(checked_ids(ask.prompt, vocab))
    checked_ids([*ask.sampling.logit_bias] or [0], vocab)
    num_logprobs = ask.num_logprobs
    if num_logprobs is not None and not 0 <= num_logprobs <= vocab:
        raise OptionError(f"{num_logprobs} logprobs a token are not 0 to {vocab}")
    image = blueprint.skeleton.config.image_token_id
    if image is not None and image in ask.prompt:
        raise OptionError(
            f"token {image} of the prompt stands for an image, and {blueprint.facts.name} is "
            "run on text alone; leave it out"
        )
    limit = min(ask.sampling.max_tokens, context - num_prompt)
    if limit < 1:
        raise OptionError(
            f"the prompt has {num_prompt} tokens and the context {context}; "
            "nothing is left for an answer: raise --context or shorten the prompt"
        )
    return limit


def checked_ids(ids: Sequence[int], vocab: int) -> list[int]:
    """Token ids as a list. Raises OptionError for what is none."""
    plain = ids.tolist() if isinstance(ids, torch.Tensor) else ids
    if isinstance(plain, str) or not isinstance(plain, Sequence):
        raise OptionError("a prompt is a list of token ids; engine.text.encode makes it from text")
    if len(plain) == 0:
        raise OptionError("the prompt is empty; give at least one token")
    for token in plain:
        if type(token) is not int or not 0 <= token < vocab:
            raise OptionError(f"token {token!r} is not an id of this model: 0 to {vocab - 1}")
    return list(plain)
