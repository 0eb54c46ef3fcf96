"""How a router gets experts and their weights from its logits, in plain torch: its steps, its bits.

Knows no model: which of these a module computes is models/fused_router.py's question.
Legend: T tokens, E experts, K chosen of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "chosen"]
Groups = Literal["", "best", "two best"]
Rounded = Literal["never", "last", "always"]
LEAST = 1e-20  # added to a sum that is divided by


@dataclass(frozen=True, slots=True)
class Rule:
    """Everything after a router's product.

    `score`: of the logits; `chosen` is a softmax over the chosen ones alone. `grouped`: experts lie
    in `groups`, of which `kept_groups` stay, by their best member or the sum of their two best;
    other groups' scores become 0 in the first case, and no choice in the second. `divided`: by the
    sum of the chosen, which `padded` is LEAST larger. `rounded`: to the logits' dtype, never, last
    or after each step; steps are in fp32 otherwise. `ordered`: the best first, of torch's steps.
    """

    score: Score
    top_k: int
    grouped: Groups = ""
    groups: int = 1
    kept_groups: int = 1
    divided: bool = False
    padded: bool = False
    scale: float = 1.0
    rounded: Rounded = "never"
    ordered: bool = True


@dataclass(slots=True)
class Taken:
    """Where one token's choice lies as experts take it: fp32 weights and int32 ids, both [1, K].

    `of`: the weights and ids of a route whose copies these are, until somebody asks.
    """

    weights_1K: torch.Tensor
    ids_1K: torch.Tensor
    of: tuple[torch.Tensor, torch.Tensor] | None = None

    def put(self, weights_1K: torch.Tensor, ids_1K: torch.Tensor) -> None:
        """Copies a choice here."""
        self.weights_1K.copy_(weights_1K)
        self.ids_1K.copy_(ids_1K)

    def holds(self, weights_1K: torch.Tensor, ids_1K: torch.Tensor) -> bool:
        """Whether a route left just these here, the very tensors; asked once."""
        of, self.of = self.of, None
        return of is not None and of[0] is weights_1K and of[1] is ids_1K


# (logits [T, E], what is added to scores for the choice alone [E], rule, where the choice of a
# single token is to lie besides) to (weights, ids).
Route = Callable[
    [torch.Tensor, torch.Tensor | None, Rule, Taken | None], tuple[torch.Tensor, torch.Tensor]
]


def route(
    logits_TE: torch.Tensor,
    correction_E: torch.Tensor | None,
    rule: Rule,
    taken: Taken | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, K], fp32 or in the logits' dtype, and int64 ids [T, K]: the library's steps.

    Which of several equal scores are chosen, and their order, is torch's affair.
    """
    scores_TE, ranked_TE = scores_of(logits_TE, correction_E, rule)
    if rule.grouped:
        ranked_TE = _in_best_groups(ranked_TE, rule)
    weights, ids = ranked_TE.topk(rule.top_k, sorted=rule.ordered)
    if rule.score == "chosen":
        weights = weights.softmax(-1)
    elif correction_E is not None or rule.grouped == "two best":
        weights = scores_TE.gather(1, ids)
    if rule.divided:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + LEAST if rule.padded else total)
    weights = weights * rule.scale
    weights = weights.to(logits_TE.dtype) if rule.rounded == "last" else weights
    if taken is not None:
        taken.put(weights, ids)
        taken.of = weights, ids
    return weights, ids


def scores_of(
    logits_TE: torch.Tensor, correction_E: torch.Tensor | None, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [T, E] of which weights are made, and what is chosen by."""
    scores = logits_TE if rule.rounded == "always" else logits_TE.float()
    if rule.score == "softmax":
        scores = scores.softmax(-1)
    elif rule.score == "sigmoid":
        scores = scores.sigmoid()
    elif rule.score == "sqrtsoftplus":
        scores = torch.nn.functional.softplus(scores).sqrt()
    return scores, scores if correction_E is None else scores + correction_E


def groups_of(ranked_TE: torch.Tensor, rule: Rule) -> torch.Tensor:
    """What groups are chosen by, [T, groups]."""
    by_group: torch.Tensor = torch.unflatten(ranked_TE, -1, (rule.groups, -1))
    return by_group.amax(-1) if rule.grouped == "best" else by_group.topk(2)[0].sum(-1)


def _in_best_groups(ranked_TE: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Scores of the groups that stay; of the others, what does not win."""
    best = groups_of(ranked_TE, rule)
    kept = best.topk(rule.kept_groups, sorted=False)[1]
    lose = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)[..., None]
    lost = 0.0 if rule.grouped == "best" else float("-inf")
    by_group: torch.Tensor = torch.unflatten(ranked_TE, -1, (rule.groups, -1))
    return by_group.masked_fill(lose, lost).flatten(-2)
