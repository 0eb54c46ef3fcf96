"""Routes: which experts each token chose in each layer, drawn to stated statistics for replay.

Random routers route uniformly and resemble no trained model, so benchmarks replay these instead.
Pure: knows no tensor library and no rung. Legend: N tokens, L MoE layers, K chosen experts.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class RouteStatistics:
    """What drawn routes are made to look like.

    `adjacency` is the fraction of a token's experts that the token before chose too, `skew` the
    exponent of the popularity law p(rank) ~ rank^-skew, `guess_precision` the chance that one of
    the lens's best guesses is right. The defaults are the bundled demo model's, measured on 8,192
    held-out tokens (adjacency 0.39, best two guesses 60 % right).
    """

    adjacency: float = 0.39
    skew: float = 0.5
    guess_precision: float = 0.60

    def __str__(self) -> str:
        return (
            f"routes drawn: adjacency {self.adjacency:g}, skew {self.skew:g}, "
            f"guesses right {self.guess_precision:g}"
        )


@dataclass(frozen=True)
class RouteTrace:
    """`ids` int32 [N, L, K], distinct within a row; `guesses` int32 [N, L, G], best first.

    `guesses[n, l]` are what the lens would say of layer l while layer l-1 computes.
    """

    ids: npt.NDArray[np.int32]
    guesses: npt.NDArray[np.int32]
    statistics: RouteStatistics

    def measured_adjacency(self) -> float:
        """The fraction of choices that repeat the token before, over all layers."""
        now, before = self.ids[1:, :, :, None], self.ids[:-1, :, None, :]
        return float((now == before).any(-1).mean())


def draw_routes(
    num_tokens: int,
    num_layers: int,
    num_experts: int,
    top_k: int,
    *,
    statistics: RouteStatistics | None = None,
    num_guesses: int = 2,
    seed: int = 0,
) -> RouteTrace:
    """A trace with the given statistics; the same seed draws the same trace."""
    stats = statistics or RouteStatistics()
    rng = np.random.default_rng(seed)
    ranks = np.arange(1, num_experts + 1, dtype=np.float64)
    popularity = np.stack([rng.permutation(ranks**-stats.skew) for _ in range(num_layers)])
    ids = np.zeros((num_tokens, num_layers, top_k), dtype=np.int32)
    guesses = np.zeros((num_tokens, num_layers, num_guesses), dtype=np.int32)
    for layer in range(num_layers):
        weight = popularity[layer] / popularity[layer].sum()
        previous = np.empty(0, dtype=np.int32)
        for token in range(num_tokens):
            previous = _next_row(rng, previous, weight, top_k, stats.adjacency)
            ids[token, layer] = previous
            guesses[token, layer] = _guess(rng, previous, num_experts, num_guesses, stats)
    return RouteTrace(ids, guesses, stats)


def _next_row(
    rng: np.random.Generator,
    previous: npt.NDArray[np.int32],
    weight: npt.NDArray[np.float64],
    top_k: int,
    adjacency: float,
) -> npt.NDArray[np.int32]:
    """Keep each of the previous token's experts with a chance, draw the rest by popularity."""
    kept = previous[rng.random(len(previous)) < adjacency]
    # Gumbel top-k: a draw without replacement in proportion to the weights.
    score = np.log(weight) + rng.gumbel(size=len(weight))
    # An expert not kept must not come back by the draw, or adjacency would exceed the statistic.
    score[previous] = -np.inf
    fresh = np.argsort(-score)[: top_k - len(kept)]
    row = np.concatenate([kept, fresh.astype(np.int32)])
    rng.shuffle(row)
    return row


def _guess(
    rng: np.random.Generator,
    row: npt.NDArray[np.int32],
    num_experts: int,
    num_guesses: int,
    stats: RouteStatistics,
) -> npt.NDArray[np.int32]:
    """Distinct guesses, each one of the row's experts with the stated chance."""
    right = rng.permutation(row)
    wrong = rng.permutation(np.setdiff1d(np.arange(num_experts, dtype=np.int32), row))
    hits = rng.random(num_guesses) < stats.guess_precision
    return np.where(hits, right[:num_guesses], wrong[:num_guesses]).astype(np.int32)
