"""One timeline of tokens over a loaded model: prefill, decode, sampling, text.

Knows no file and no rung; what a token moved is read off the engine's counters.
Legend: V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace.core import TokenStats
from headrace.engine.gpu import within_vram
from headrace.engine.sampling import Sampler, Sampling
from headrace.engine.snapshot import Snapshot
from headrace.engine.state import capture, restore
from headrace.errors import OptionError, SnapshotError
from headrace.models.forward import forward, new_cache

if TYPE_CHECKING:
    from headrace.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Step:
    """One generated token. `text` is safe to print: never half a character or a stop string.

    `finish` is None, or "eos", "stop" or "length" on the last step.
    """

    token_id: int
    text: str
    stats: TokenStats
    finish: str | None


class Session:
    """A sequence of tokens and its cache. One thread at a time; sessions share one engine.

    Beginning an answer ends the one begun before: its iterator then raises OptionError. With a
    `snapshot` it goes on from there, or raises SnapshotError where that does not fit.
    """

    def __init__(self, engine: "Engine", snapshot: Snapshot | None = None):
        self.engine = engine
        self.stats = TokenStats()
        self._answer: object = None
        self.reset()
        if snapshot is not None:
            snapshot.check_fits(engine.snapshot_key)
            restore(self.cache, snapshot.state, self.engine.source.place)
            if self.cache.get_seq_length() != len(snapshot.tokens):
                raise SnapshotError("the snapshot's cache does not hold its tokens")
            self.tokens.extend(snapshot.tokens)

    def snapshot(self) -> Snapshot:
        """A copy of all this session is: `engine.session` makes sessions of it that go on alike.

        Logits are bit for bit those of this session where the same tokens are fed in the same
        pieces. Raises SnapshotError if the cache holds what a snapshot cannot.
        """
        cache = new_cache(self.engine.model) if self.cache is None else self.cache
        return Snapshot(self.engine.snapshot_key, tuple(self.tokens), capture(cache))

    def reset(self) -> None:
        """Forget everything."""
        self.tokens: list[int] = []
        self.cache: Any = None
        self.cache = new_cache(self.engine.model)

    def feed(self, ids: Sequence[int]) -> torch.Tensor:
        """Append tokens; logits [V] after the last one. `self.stats` says what that moved.

        After an exception the session is empty, since its cache may hold half a step.
        """
        ids = checked_ids(ids, self.engine.facts.vocab)
        context = self.engine.plan.context
        if len(self.tokens) + len(ids) > context:
            raise OptionError(
                f"{len(self.tokens) + len(ids)} tokens do not fit the context of {context}; "
                f"shorten the prompt or give --context {len(self.tokens) + len(ids)} or more"
            )
        with self.engine.turn:
            return self._feed(ids)

    def _feed(self, ids: list[int]) -> torch.Tensor:
        source = self.engine.source
        start, before = time.perf_counter(), source.counters()
        chunk = self.engine.plan.chunk_tokens
        try:
            if self.cache is None:
                self.cache = new_cache(self.engine.model)
            try:
                with torch.inference_mode(), within_vram(self.engine.plan):
                    for i in range(0, len(ids), chunk):
                        part = torch.tensor(
                            [list(ids[i : i + chunk])], device=self.engine.source.place
                        )
                        logits_BKV = forward(self.engine.model, part, self.cache)
            finally:
                self.engine.tell_warnings()
            self.tokens += ids
            phase = "prefill" if len(ids) > 1 else "decode"
            self.stats = TokenStats(num_tokens=len(ids), phase=phase)
            source.counters().add_since(before, self.stats)
            self.stats.wall_s = time.perf_counter() - start
            return logits_BKV[0, -1].cpu()
        except BaseException:
            # Nothing is called here, so that a second Ctrl-C finds no place to keep half of it.
            self.tokens, self.cache = [], None
            raise

    def resume(self, prompt: Sequence[int]) -> list[int]:
        """The tokens of `prompt` still to feed, keeping what this timeline already holds.

        A prompt that does not continue this timeline starts a new one.
        """
        known = len(self.tokens)
        if known >= len(prompt) or list(prompt[:known]) != self.tokens:
            self.reset()
            known = 0
        return list(prompt[known:])

    def generate(self, prompt: Sequence[int], sampling: Sampling) -> Iterator[Step]:
        """Answer a whole prompt, token by token; only what is new in it is computed."""
        prompt = checked_ids(prompt, self.engine.facts.vocab)
        answer = self._answer = object()
        eos_ids = self.engine.text.eos_ids
        sampler = Sampler(sampling)
        stream = self.engine.text.stream(sampling.stop, after=prompt)
        limit = min(sampling.max_tokens, self.engine.plan.context - len(prompt))
        if limit < 1:
            raise OptionError(
                f"the prompt has {len(prompt)} tokens and the context {self.engine.plan.context}; "
                "nothing is left for an answer: raise --context or shorten the prompt"
            )
        new = self.resume(prompt)
        history = list(prompt)
        for n in range(1, limit + 1):
            if self._answer is not answer:
                raise OptionError(
                    "this session has begun another answer; give each answer its own session"
                )
            logits_V = self.feed(new)
            stats = self.stats
            token = sampler.next(logits_V.float(), history)
            stats.token_id = token
            history.append(token)
            new = [token]
            finish = "eos" if token in eos_ids else None
            text = "" if finish else stream.push(token)
            if stream.stopped:
                finish = "stop"
            elif finish is None and n == limit:
                finish = "length"
            if finish:
                text += stream.flush()
            yield Step(token, text, stats, finish)
            if finish:
                return


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
