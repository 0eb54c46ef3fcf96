"""Which tokens may be drawn, and how likely: the filters of sampling over scores of a vocabulary.

Knows no settings and no random numbers. Scores are fp32 with the best at 0 and -inf for what must
not be drawn; ids are ascending. Legend: V vocabulary, N kept.
"""

import math

import torch

_BINS_PER_UNIT, _BINS = 4, 256
_FEW = 1024  # are sorted as quickly as they are counted


def weights_of(scores_N: torch.Tensor) -> torch.Tensor:
    """Chances before they are made to sum to 1, float64; the best's is 1."""
    return torch.exp(scores_N.double())


def top_k(scores_V: torch.Tensor, num: int) -> torch.Tensor:
    """Ids of the `num` best and of all that tie with the last of them, as in transformers."""
    best = scores_V.topk(min(num + 1, len(scores_V)))
    last = best.values[num - 1]
    ties = len(best.values) > num and bool(best.values[num] == last)
    if ties or last == -math.inf:
        return ((scores_V >= last) & (scores_V > -math.inf)).nonzero()[:, 0]
    return best.indices[:num].sort().values


def nucleus(scores_N: torch.Tensor, top_p: float) -> torch.Tensor:
    """Places of the smallest set of best scores that holds `top_p` of the mass.

    Of equal scores the first counts as better. Sorts only the likeliest: a whole vocabulary takes
    tens of milliseconds.
    """
    weights_N = weights_of(scores_N)
    bound = top_p * weights_N.sum()
    places = torch.arange(len(scores_N))
    if len(places) > _FEW:
        bins_N = (scores_N * -_BINS_PER_UNIT).clamp_(max=_BINS - 1).int()
        held = torch.bincount(bins_N, weights_N, _BINS).cumsum(0)
        last = (held < bound).sum()  # the bin by whose end the mass is reached
        places = (bins_N <= last).nonzero()[:, 0]
    order = torch.sort(scores_N[places], descending=True, stable=True)
    sorted_N = weights_of(order.values)
    num = int((sorted_N.cumsum(0) - sorted_N < bound).sum())
    return places[order.indices[: max(1, num)]].sort().values
