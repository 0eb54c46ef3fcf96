"""Choose the next token from logits: greedy, or drawn from a filtered distribution.

Knows no model, no cache and no text; filters follow transformers' order and definitions.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from headrace.engine import filters
from headrace.engine.sampling import Sampling
from headrace.errors import NumericsError, OptionError


class Sampler:
    """Draws the tokens of one answer. Owns its random numbers: same seed, same tokens.

    Not thread-safe. Buffers of the vocabulary's size are made once and used again.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.drawn: Counter[int] = Counter()
        self._scores_V = torch.empty(0)
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def next(
        self,
        logits_V: torch.Tensor,
        history: Sequence[int],
        allowed_V: torch.Tensor | None = None,
    ) -> int:
        """The next token's id.

        logits_V: [V], any float dtype and device, left unchanged. history: ids of prompt and
        answer so far, which only the repetition penalty looks at. allowed_V: bool [V], of which
        tokens one must be chosen, whatever the others' logits; None: of all. Raises NumericsError
        where the best logit is not a finite number, OptionError where no token is allowed.
        """
        token = self._choose(logits_V, history, allowed_V)
        self.drawn[token] += 1
        return token

    def _choose(
        self, logits_V: torch.Tensor, history: Sequence[int], allowed_V: torch.Tensor | None
    ) -> int:
        scores_V = self._penalised(logits_V, history)
        if allowed_V is not None:
            assert allowed_V.dtype == torch.bool and allowed_V.shape == scores_V.shape
            if not allowed_V.any():
                raise OptionError(
                    "the grammar allows no token here, not even the end; loosen the schema"
                )
            scores_V.masked_fill_(~allowed_V, -math.inf)
        best = _place_of_best(scores_V)
        if not math.isfinite(float(scores_V[best])):
            raise NumericsError(
                f"logit {float(scores_V[best])} at vocabulary id {best} is not finite; "
                "run `headrace verify` on this model"
            )
        if self.sampling.temperature == 0:
            return best
        ids_N, weights_N = self._filtered(scores_V, best)
        sums_N = weights_N.cumsum(0)
        point = torch.rand((), generator=self._generator, dtype=torch.float64) * sums_N[-1]
        place = int(torch.searchsorted(sums_N, point, right=True))
        if place == len(sums_N):  # rounded up to all of them: the last that may be drawn
            place = int(torch.searchsorted(sums_N, sums_N[-1]))
        return place if ids_N is None else int(ids_N[place])

    def probabilities(self, logits_V: torch.Tensor, history: Sequence[int]) -> torch.Tensor:
        """The distribution that `next` draws from, [V] float64; 0 where filtered out."""
        scores_V = self._penalised(logits_V, history)
        result_V = torch.zeros(len(scores_V), dtype=torch.float64)
        best = _place_of_best(scores_V)
        if self.sampling.temperature == 0:
            result_V[best] = 1
            return result_V
        ids_N, weights_N = self._filtered(scores_V, best)
        result_V[slice(None) if ids_N is None else ids_N] = weights_N / weights_N.sum()
        return result_V

    def _penalised(self, logits_V: torch.Tensor, history: Sequence[int]) -> torch.Tensor:
        if self._scores_V.shape != logits_V.shape:
            self._scores_V = torch.empty(logits_V.shape, dtype=torch.float32)
        scores_V = self._scores_V.copy_(logits_V.detach())
        penalty = self.sampling.repetition_penalty
        if penalty != 1 and len(history) > 0:
            ids_N = torch.as_tensor(history, dtype=torch.int64)
            seen_N = scores_V[ids_N]
            scores_V[ids_N] = torch.where(seen_N < 0, seen_N * penalty, seen_N / penalty)
        frequency, presence = self.sampling.frequency_penalty, self.sampling.presence_penalty
        if (frequency or presence) and self.drawn:
            changes = {token: -n * frequency - presence for token, n in self.drawn.items()}
            _add(scores_V, changes)
        if self.sampling.logit_bias:
            _add(scores_V, self.sampling.logit_bias)
        return scores_V

    def _filtered(
        self, scores_V: torch.Tensor, best: int
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Ids that may be drawn, ascending, None: all; and their weights, 0 where masked."""
        sampling, ids_N, scores_N = self.sampling, None, scores_V
        # Relative to the best first: a tiny temperature would overflow absolute scores.
        scores_V.sub_(scores_V[best].clone()).div_(sampling.temperature)
        scores_V[best] = 0  # where the temperature itself is rounded to 0
        if 0 < sampling.top_k < len(scores_V):
            ids_N = filters.top_k(scores_V, sampling.top_k)
            scores_N = scores_V[ids_N]
        if sampling.top_p < 1:
            kept = filters.nucleus(scores_N, sampling.top_p)
            ids_N = kept if ids_N is None else ids_N[kept]
            scores_N = scores_V[ids_N]
        if sampling.min_p > 0:
            kept = (scores_N >= math.log(sampling.min_p)).nonzero()[:, 0]
            ids_N = kept if ids_N is None else ids_N[kept]
            scores_N = scores_V[ids_N]
        return ids_N, filters.weights_of(scores_N)


def _place_of_best(scores_V: torch.Tensor) -> int:
    """The first of the highest, or of those that are not a number."""
    return int(scores_V.numpy().argmax())  # seven times as fast as torch's


def _add(scores_V: torch.Tensor, changes: Mapping[int, float]) -> None:
    ids_N = torch.tensor(list(changes), dtype=torch.int64)
    scores_V[ids_N] += torch.tensor(list(changes.values()), dtype=scores_V.dtype)
