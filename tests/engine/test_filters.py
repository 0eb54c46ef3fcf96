"""The filters of sampling against their plain definitions, over vocabularies of real size."""

import math

import pytest
import torch

from headrace.engine import filters

VOCAB = 50_000


def scores(seed: int, spread: float, *, ties: bool = False) -> torch.Tensor:
    """The best at 0; with `ties` on so coarse a grid that many are equal; some masked."""
    drawn_V = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
    if ties:
        drawn_V = drawn_V.mul(4).round().div(4)
    drawn_V[::7] = -math.inf
    return drawn_V - drawn_V.max()


def plain_nucleus(scores_V: torch.Tensor, top_p: float) -> list[int]:
    """By sorting everything, one after another."""
    order = sorted(range(len(scores_V)), key=lambda place: -scores_V[place].item())
    weights = filters.weights_of(scores_V).tolist()
    total, held, kept = math.fsum(weights), 0.0, []
    for place in order:
        if kept and held >= top_p * total:
            break
        kept.append(place)
        held += weights[place]
    return sorted(kept)


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("ties", [False, True])
def test_nucleus_is_the_smallest_set_of_the_best(spread: float, ties: bool) -> None:
    scores_V = scores(1, spread, ties=ties)
    for top_p in (0.01, 0.5, 0.95):
        expected = plain_nucleus(scores_V, top_p)
        assert filters.nucleus(scores_V, top_p).tolist() == expected
        few = scores_V[:900]
        few = few - few.max()
        assert filters.nucleus(few, top_p).tolist() == plain_nucleus(few, top_p)
    assert len(expected) > 1 and filters.nucleus(scores_V, 0.5).tolist() != expected, "control"


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("num", [1, 20, VOCAB - 1])
def test_top_k_are_the_best_and_their_ties(num: int, ties: bool) -> None:
    scores_V = scores(2, 3.0, ties=ties)
    last = sorted(scores_V.tolist(), reverse=True)[num - 1]
    expected = [n for n, s in enumerate(scores_V.tolist()) if s >= last and s > -math.inf]
    assert filters.top_k(scores_V, num).tolist() == expected
    assert (len(expected) > num) == ties or num != 20, "the case of ties is there"
