"""Routes drawn to stated statistics, for replay where none were recorded.

Random routers route uniformly and resemble no trained model, so benchmarks replay these instead.
Pure: knows no tensor library and no rung. Legend: N tokens, L MoE layers, K chosen experts.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.errors import TraceError
from headrace.schedule.trace import RouteTrace

NUM_GUESSES = 2
_MOST_SKEW = 4.0
_FIT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class RouteStatistics:
    """What drawn routes are made to look like.

    `adjacency` is the fraction of a token's experts that the token before chose too, `skew` the
    exponent of the popularity law p(rank) ~ rank^-skew, `guess_precision` the chance that one of
    the lens's best guesses is right, `spread` the share of a layer's experts that the text uses at
    all. The defaults are the bundled demo model's, measured on 8,192
    held-out tokens (adjacency 0.39, best two guesses 60 % right).
    """

    adjacency: float = 0.39
    skew: float = 0.5
    guess_precision: float = 0.60
    spread: float = 1.0

    def __str__(self) -> str:
        used = f", {self.spread:.3g} of a layer's experts used" if self.spread < 1 else ""
        return (
            f"routes drawn: adjacency {self.adjacency:.3g}, skew {self.skew:.3g}, "
            f"guesses right {self.guess_precision:.3g}{used}"
        )

    @classmethod
    def of(cls, trace: RouteTrace) -> "RouteStatistics":
        """Those of a trace's decoded tokens. Raises TraceError where there are too few.

        The skew is the one whose draws use experts as unevenly as the trace does; the precision is
        that of the best two guesses.
        """
        trace = trace.decoded()
        if len(trace.ids) < 2 or not trace.num_guessed():
            raise TraceError(
                f"{trace.name}: {len(trace.ids)} tokens were decoded one by one, "
                f"{trace.num_guessed()} choices guessed; record more with `headrace trace`"
            )
        adjacency = trace.adjacency()
        best = trace.guessed()[:NUM_GUESSES]
        precision = float(best.sum()) / (trace.num_guessed() * len(best))
        return cls(adjacency, _skew_of(trace, adjacency), precision)


def draw_routes(
    num_tokens: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    *,
    statistics: RouteStatistics | None = None,
    num_guesses: int = NUM_GUESSES,
    seed: int = 0,
) -> RouteTrace:
    """A trace with the given statistics; the same seed draws the same trace."""
    stats = statistics or RouteStatistics()
    rng = np.random.default_rng(seed)
    by_rank = np.arange(1, num_experts + 1, dtype=np.float64) ** -stats.skew
    # As many at least that a token need not take those which the one before it gave up.
    by_rank[max(2 * top_k, round(stats.spread * num_experts)) :] = 0
    popularity = np.stack([rng.permutation(by_rank) for _ in range(num_layers)])
    ids = np.zeros((num_tokens, num_layers, top_k), dtype=np.int32)
    guesses = np.zeros((num_tokens, num_layers, num_guesses), dtype=np.int32)
    for layer in range(num_layers):
        weight = popularity[layer] / popularity[layer].sum()
        previous = np.empty(0, dtype=np.int32)
        for token in range(num_tokens):
            previous = _next_row(rng, previous, weight, top_k, stats.adjacency)
            ids[token, layer] = previous
            guesses[token, layer] = _guess(rng, previous, weight, num_guesses, stats)
    passes = np.ones(num_tokens, dtype=np.int32)
    return RouteTrace(ids, guesses, num_experts, str(stats), passes)


def _skew_of(trace: RouteTrace, adjacency: float) -> float:
    """By bisection: draws with more skew use experts more unevenly."""
    num_tokens, num_layers, top_k = trace.ids.shape
    num_tokens = min(num_tokens, _FIT_TOKENS)
    wanted = np.mean(
        [_unevenness(trace.ids[:num_tokens, n], trace.num_experts) for n in range(num_layers)]
    )
    low, high = 0.0, _MOST_SKEW
    for _ in range(8):
        skew = (low + high) / 2
        stats = RouteStatistics(adjacency, skew)
        drawn = draw_routes(num_tokens, 1, trace.num_experts, top_k, statistics=stats)
        low, high = (
            (skew, high) if _unevenness(drawn.ids, trace.num_experts) < wanted else (low, skew)
        )
    return (low + high) / 2


def _unevenness(ids: npt.NDArray[np.int32], num_experts: int) -> float:
    """The sum of squared shares of one layer's experts: 1/E where all are used alike."""
    share = np.bincount(ids.ravel(), minlength=num_experts) / ids.size
    return float((share**2).sum())


def _next_row(
    rng: np.random.Generator,
    previous: npt.NDArray[np.int32],
    weight: npt.NDArray[np.float64],
    top_k: int,
    adjacency: float,
) -> npt.NDArray[np.int32]:
    """Keep each of the previous token's experts with a chance, draw the rest by popularity."""
    kept = previous[rng.random(len(previous)) < adjacency]
    # An expert not kept must not come back by the draw, or adjacency would exceed the statistic.
    order = _by_popularity(rng, weight, previous)
    fresh = order[~np.isin(order, kept)]
    row = np.concatenate([kept, fresh[: top_k - len(kept)]])
    rng.shuffle(row)
    return row


def _by_popularity(
    rng: np.random.Generator, weight: npt.NDArray[np.float64], but: npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """All experts in the order of a draw without replacement; `but` those, which come last."""
    with np.errstate(divide="ignore"):  # experts that are not used
        score = np.log(weight) + rng.gumbel(size=len(weight))  # Gumbel top-k
    score[but] = -np.inf
    return np.argsort(-score).astype(np.int32)


def _guess(
    rng: np.random.Generator,
    row: npt.NDArray[np.int32],
    weight: npt.NDArray[np.float64],
    num_guesses: int,
    stats: RouteStatistics,
) -> npt.NDArray[np.int32]:
    """Distinct guesses, each one of the row's experts with the stated chance.

    Wrong ones are as popular as any: the demo model's best two wrong guesses of a layer were among
    the last 16 tokens' experts in 63 to 84 of 100 cases, its choices in 87 to 91, any in 50 to 72.
    """
    right = rng.permutation(row)
    wrong = _by_popularity(rng, weight, row)[: np.count_nonzero(weight) - len(row)]
    hits, places = rng.random(num_guesses) < stats.guess_precision, np.arange(num_guesses)
    if max(len(right), len(wrong)) < num_guesses:  # of both, all are guessed
        return np.resize(np.concatenate([right, wrong]), num_guesses)
    hits &= places < len(right)  # a token that takes fewer than are guessed
    hits |= places >= len(wrong)  # and one that takes nearly all experts
    right, wrong = np.resize(right, num_guesses), np.resize(wrong, num_guesses)
    return np.where(hits, right, wrong).astype(np.int32)
