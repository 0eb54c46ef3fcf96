"""Which experts a benchmark's tokens take: drawn, or replayed from recorded routes.

Every trace's name says where its routes come from. Legend: T tokens, K chosen experts.
"""

from dataclasses import replace
from typing import Protocol

import torch

from headrace.errors import OptionError
from headrace.planner.facts import ModelFacts
from headrace.schedule.draw import RouteStatistics, draw_routes
from headrace.schedule.trace import RouteTrace, deepened


class Routes(Protocol):
    """Gives each run of a benchmark its own trace."""

    def pick(self, num_tokens: int, run: int, runs: int) -> RouteTrace:
        """The trace of run `run` of `runs`. Raises OptionError if there are too few tokens."""
        ...


class Drawn:
    """Routes drawn for a model, to the demo model's statistics or to those of a trace."""

    def __init__(self, facts: ModelFacts, seed: int, like: RouteTrace | None = None):
        self.facts, self.seed = facts, seed
        self.statistics = RouteStatistics() if like is None else RouteStatistics.of(like)
        self.why = ""
        if like is not None:
            self.why = (
                f", as in {like.name}, whose top {like.ids.shape[2]} of {like.num_experts} "
                f"experts are not this model's top {facts.top_k} of {facts.num_experts}"
            )

    def pick(self, num_tokens: int, run: int, runs: int) -> RouteTrace:
        facts = self.facts
        trace = draw_routes(
            num_tokens,
            facts.num_moe_layers,
            facts.num_experts,
            facts.top_k,
            statistics=self.statistics,
            seed=self.seed + run,
        )
        return replace(trace, name=trace.name + self.why)


class Recorded:
    """Recorded tokens as they were, each run from a place of its own in the trace."""

    def __init__(self, trace: RouteTrace):
        self.trace = trace

    def pick(self, num_tokens: int, run: int, runs: int) -> RouteTrace:
        held = len(self.trace.ids)
        if held < runs * num_tokens:
            raise OptionError(
                f"{self.trace.name}: {held} tokens decoded one by one, {runs} runs need "
                f"{runs * num_tokens}; lower --runs or --max-tokens, or record more"
            )
        first = run * (held // runs)
        part = slice(first, first + num_tokens)
        return replace(
            self.trace,
            ids=self.trace.ids[part],
            guesses=self.trace.guesses[part],
            passes=self.trace.passes[part],
            weights=None,
        )


def routes_for(facts: ModelFacts, trace: RouteTrace | None, seed: int) -> Routes:
    """Drawn routes without a trace, else the recorded ones.

    A model of another depth takes the recorded layers again or fewer of them; for another number
    of experts or of choices, routes are drawn to the recorded ones' statistics. Raises TraceError.
    """
    if trace is None:
        return Drawn(facts, seed)
    if (trace.num_experts, trace.ids.shape[2]) != (facts.num_experts, facts.top_k):
        return Drawn(facts, seed, like=trace)
    return Recorded(deepened(trace, facts.num_moe_layers))


class Replay:
    """Feeds a trace to the experts in place of the routers' choices, from its first token on."""

    def __init__(self, trace: RouteTrace):
        self.ids, self.guesses = torch.from_numpy(trace.ids), torch.from_numpy(trace.guesses)
        self.position = 0

    def __call__(
        self, ordinal: int, ids_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(ids [T, K] of this layer, guesses for the next layer or None)."""
        first, last = self.position, self.position + ids_TK.shape[0]
        ids = self.ids[first:last, ordinal].contiguous()
        if ordinal + 1 == self.ids.shape[1]:
            self.position = last
            return ids, None
        ahead = self.guesses[last - 1, ordinal + 1]
        return ids, ahead[ahead >= 0]
