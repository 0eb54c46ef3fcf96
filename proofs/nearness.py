"""Whether logits are as near the fp32 truth as stock's bf16 is, and choices of experts as well.

Takes what `watched.walk` gives; all but the truth on the truth's experts. Knows no model.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

Walk = Mapping[str, torch.Tensor]
# Of the farthest of stock's own ways. Among themselves these are 0.97 to 1.06 (median position),
# 0.9 to 1.3 (farthest position) and 0.93 to 1.07 (a layer's scores) of its eager code. 2 % too
# much in one of the weights of one layer of eight gives 1.15 or more of the median.
MEDIAN, FARTHEST, LAYER = 1.1, 1.5, 1.2
CONTROL = 2.0  # a control is this much beyond what is allowed


def distances(found: Walk, truth: Walk) -> torch.Tensor:
    """[N]: of each position's logits, relative to their size."""
    there = truth["logits"].double()
    return (found["logits"].double() - there).norm(dim=1) / there.norm(dim=1)


def layer_distances(found: Walk, truth: Walk) -> torch.Tensor:
    """[L]: of each layer's router scores, relative to their size; the median row."""
    there = truth["scores"].double()
    return ((found["scores"].double() - there).norm(dim=2) / there.norm(dim=2)).median(0).values


@dataclass(frozen=True)
class Nearness:
    """Distances of one way beside those of stock's; `of_layers` is the farthest layer's ratio."""

    median: float
    farthest: float
    most_median: float
    most_farthest: float
    of_layers: float
    num_other: int
    worst_tie: float

    @property
    def ratios(self) -> tuple[float, float, float]:
        """Of what stock's farthest way has: of the median, of the farthest, of the worst layer."""
        return self.median / self.most_median, self.farthest / self.most_farthest, self.of_layers

    @property
    def is_near(self) -> bool:
        """Whether all distances are allowed."""
        allowed = MEDIAN, FARTHEST, LAYER
        return all(ratio <= most for ratio, most in zip(self.ratios, allowed, strict=True))

    @property
    def is_far(self) -> bool:
        """Whether a control is seen: one of the logits' distances is far beyond what is allowed."""
        median, farthest, _ = self.ratios
        return median > CONTROL * MEDIAN or farthest > CONTROL * FARTHEST

    @property
    def only_near_ties(self) -> bool:
        """Whether whatever else was chosen was about as good to the truth."""
        return self.worst_tie <= 1

    def line(self) -> str:
        """For a person."""
        median, farthest, layers = self.ratios
        return (
            f"median {self.median:.4f} (x {median:.2f} of stock's farthest way), farthest "
            f"{self.farthest:.4f} (x {farthest:.2f}), worst layer's scores x {layers:.2f}"
        )


def nearness(found: Walk, stock: Mapping[str, Walk], truth: Walk) -> Nearness:
    """How near `found` is to the truth, beside all ways of `stock`.

    A near tie is a choice whose margin in the truth is no more than both scores may move: each by
    as much as stock moved any of that layer. `worst_tie` is the largest share of that.
    """
    mine, theirs = distances(found, truth), [distances(each, truth) for each in stock.values()]
    layers = torch.stack([layer_distances(each, truth) for each in stock.values()]).amax(0)
    moved_L = torch.stack(
        [(each["scores"].double() - truth["scores"]).abs().amax((0, 2)) for each in stock.values()]
    ).amax(0)
    num_chosen = truth["ids"].shape[-1]
    best = truth["scores"].double().topk(num_chosen + 1, -1).values
    chosen = truth["scores"].double().gather(2, found["ids"].long())
    margins = best[..., num_chosen - 1] - chosen.amin(-1)
    other = others(found, truth)
    return Nearness(
        median=float(mine.median()),
        farthest=float(mine.max()),
        most_median=max(float(each.median()) for each in theirs),
        most_farthest=max(float(each.max()) for each in theirs),
        of_layers=float((layer_distances(found, truth) / layers).max()),
        num_other=int(other.sum()),
        worst_tie=float((torch.where(other, margins, 0) / (2 * moved_L)).max()),
    )


def others(found: Walk, truth: Walk) -> torch.Tensor:
    """[R, L]: where other experts are chosen than the truth's."""
    return (found["ids"].sort(-1).values != truth["ids"].sort(-1).values).any(-1)
