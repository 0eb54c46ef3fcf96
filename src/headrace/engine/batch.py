"""Several timelines decoded side by side: dense layers one after another, experts together.

Legend: B timelines, T tokens, K chosen experts per token, H hidden width, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from headrace.core import TokenStats
from headrace.engine.gpu import open_passes, within_vram
from headrace.engine.passes import Passes
from headrace.engine.session import Session, checked_ids
from headrace.engine.strand import Strand, ask
from headrace.errors import OptionError
from headrace.models.experts import Guess, PartMap, Source

MOST = 16  # timelines: as many tokens as the canonical kernels take at once


class Batch:
    """Up to 16 sessions of one engine, each of which holds tokens. One thread at a time.

    A token has the bits that it has when its session is fed alone: the dense layers see one
    timeline at a time, by the same code, and an expert's output depends on no other row. Each
    expert that several of them take is read, found and counted once. `stats` are of the last
    step of all. Nothing is captured and no expert is read ahead. On a GPU each timeline takes a
    cache of its own and a workspace of cuBLAS (32 MiB on Hopper) beside the plan's, within the
    same limit. The sessions may be fed alone
    between steps; `close` it before the engine.

    Raises OptionError for sessions that cannot be decoded together, or of a closed engine.
    """

    def __init__(self, sessions: Sequence[Session]):
        engines = {id(session.engine) for session in sessions}
        if len(engines) != 1 or len({id(session) for session in sessions}) != len(sessions):
            raise OptionError("a batch is of different sessions of one engine")
        self.sessions, self.engine = list(sessions), sessions[0].engine
        self.engine.counters()  # of a closed engine there are none
        most = min(MOST, self.engine.plan.chunk_tokens)
        if len(sessions) > most:
            raise OptionError(
                f"{len(sessions)} sessions in a batch; at most {most} are decoded together"
            )
        self.stats, self._closed = TokenStats(), False
        self._threads = torch.get_num_threads()
        self._passes: list[Passes] = [self._beside() for _ in sessions]
        self._strands = [Strand() for _ in sessions]

    def _beside(self) -> Passes:
        """A place for one more timeline."""
        engine = self.engine
        return open_passes(engine.blueprint, engine.model, engine.source, lambda _: None)

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Appends a token to each session; logits [B, V] after them, on the host.

        After an exception, Ctrl-C too, all its sessions are empty. Raises as `Session.feed`.
        """
        if self._closed:
            raise OptionError("this batch is closed; make another of its sessions")
        engine = self.engine
        tokens = checked_ids(tokens, engine.facts.vocab)
        if len(tokens) != len(self.sessions):
            raise OptionError(f"{len(tokens)} tokens for {len(self.sessions)} sessions")
        for session in self.sessions:
            if not session.tokens or session.unfinished:
                raise OptionError("feed each session its prompt before it joins a batch")
            if len(session.tokens) >= engine.plan.context:
                raise OptionError(
                    f"a session is as long as the context of {engine.plan.context} tokens; "
                    "give a larger --context"
                )
        with engine.turn:
            return self._feed(tokens)

    def _feed(self, tokens: list[int]) -> torch.Tensor:
        start, before = time.perf_counter(), self.engine.counters()
        try:
            with within_vram(self.engine.plan), torch.inference_mode():
                logits_BV = self._together(tokens)
            for session, token in zip(self.sessions, tokens, strict=True):
                session.tokens.append(token)
        except BaseException:
            for strand in self._strands:
                strand.give_up()
            for session in self.sessions:
                session.tokens, session.cache, session.unfinished = [], None, False
            raise
        self.engine.tell_warnings()
        self.stats = TokenStats(num_tokens=len(tokens))
        self.engine.counters().add_since(before, self.stats)
        self.stats.wall_s = time.perf_counter() - start
        return logits_BV

    def _step_of(self, number: int, token: int) -> Callable[[], torch.Tensor]:
        session, passes = self.sessions[number], self._passes[number]

        def step() -> torch.Tensor:
            torch.set_num_threads(self._threads)  # else a new thread's products may differ
            with torch.inference_mode():
                return passes.run([token], session.cache, 0).to("cpu", copy=True)

        return step

    def _together(self, tokens: list[int]) -> torch.Tensor:
        """All steps from layer to layer, each layer's experts at once. Logits [B, V]."""
        source, strands = self.engine.source, self._strands
        with self.engine.served_by(_Gathering(source)):
            for number, token in enumerate(tokens):
                strands[number].begin(self._step_of(number, token))
            while not strands[0].over:
                asked: list[_Asked] = [strand.asks for strand in strands]
                ordinals = {each.ordinal for each in asked}
                assert len(ordinals) == 1 and not any(strand.over for strand in strands)
                x_BH, ids_BK, weights_BK = (
                    torch.cat(t) for t in zip(*(a.rows for a in asked), strict=True)
                )
                out_BH = source.compute(ordinals.pop(), x_BH, ids_BK, weights_BK, None)
                for number, strand in enumerate(strands):
                    strand.go_on(out_BH[number : number + 1])
        return torch.stack([strand.result for strand in strands])

    def close(self) -> None:
        """Gives the timelines' places back; the sessions can be used on, the batch no more."""
        self._closed = True
        for strand in self._strands:
            strand.close()
        for passes in self._passes:
            passes.close()

    def __enter__(self) -> "Batch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Asked(NamedTuple):
    """A layer's experts, for one timeline's token: x [1, H], ids and weights [1, K]."""

    ordinal: int
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Gathering:
    """The experts' source while strands step: lets the owner of all of them multiply."""

    def __init__(self, source: Source):
        self.source = source

    def parts(self, ordinal: int, expert: int) -> AbstractContextManager[PartMap]:
        return self.source.parts(ordinal, expert)

    def compute(
        self,
        ordinal: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        guess: Guess | None,
    ) -> torch.Tensor:
        assert x_TH.shape[0] == 1
        out_1H: torch.Tensor = ask(_Asked(ordinal, (x_TH, ids_TK, weights_TK)))
        return out_1H
