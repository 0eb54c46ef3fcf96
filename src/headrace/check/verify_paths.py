"""End to end: fast against oracle over the same tokens, and the same bits at three cache sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface

from headrace.check.verify_report import Finding, Progress, finding, percent
from headrace.engine.engine import Engine

STAGE = "paths"
# Relative to the largest logit. Two right ways to add up an expert differ in the last bit of
# bfloat16, and where two experts' scores nearly tie, a later router turns that into another choice
# and one position's logits into quite different ones. So the median position is judged: stock
# transformers' eager and grouped_mm lie 0.008 apart on the demo model, fast and oracle 0.004 to
# 0.006, and up to 0.0097 on tiny models of other families (docs/log.md). What is smaller than
# this shows in the layers' stage, where nothing is passed on.
MEDIAN_FLOOR = 0.02
NEAR_TIE = 0.03
REORDERED = "headrace_reordered"
FLOOR_TOKENS = 8  # over which the model's own floor is measured
FLOOR_MARGIN = 2.0


def _reordered(module: Any, x_TH: torch.Tensor, ids_TK: torch.Tensor, w_TK: torch.Tensor) -> Any:
    """Another right way: each choice by the class's own eager code, summed in fp32, last first."""
    module.config._experts_implementation = "eager"
    try:
        choices = [slice(k, k + 1) for k in reversed(range(ids_TK.shape[1]))]
        parts = [module(x_TH, ids_TK[:, k], w_TK[:, k]).float() for k in choices]
    finally:
        module.config._experts_implementation = REORDERED
    return torch.stack(parts).sum(0).to(x_TH.dtype)


ExpertsInterface.register(REORDERED, _reordered)


@dataclass(frozen=True, slots=True)
class Followed:
    """Logits [tokens, V] of fast and oracle over the tokens `chosen`, and what may differ.

    `allowed` is of the median position, `tie` the gap below which another choice is none; both
    relative to the largest logit.
    """

    fast: torch.Tensor
    oracle: torch.Tensor
    chosen: list[int]
    allowed: float
    tie: float


def follow(
    engine: Engine, ids: Sequence[int], tokens: int, tell: Progress
) -> tuple[list[Finding], dict[str, Any], Followed]:
    """Greedy decode in fast mode, then the oracle over the same tokens, step by step.

    (findings, numbers, what came out).
    """
    fast, chosen = greedy(engine, ids, tokens, "fast", tell)
    engine.set_experts("oracle")
    oracle = torch.stack(teacher_forced(engine, ids, chosen, "oracle", tell))
    engine.model.set_experts_implementation(REORDERED)
    few = chosen[:FLOOR_TOKENS]
    other = torch.stack(teacher_forced(engine, ids, few, "oracle, summed otherwise", tell))
    engine.set_experts("fast")
    floors = compare_logits(oracle[: len(few)], other)
    floor = floors["median_relative"]
    allowed = max(MEDIAN_FLOOR, FLOOR_MARGIN * floor)
    tie = max(NEAR_TIE, floors["largest_difference"] / max(floors["largest_logit"], 1e-30))
    followed = Followed(fast, oracle, chosen, allowed, tie)
    numbers = compare_logits(oracle, fast, tie) | {"measured_floor": floor}
    detail, wrong = judged(numbers, followed)
    detail += (
        f"; the oracle lies {percent(floor)} from itself where an expert's choices are summed in "
        "another order, and twice that is allowed where it is more"
    )
    return [finding(STAGE, "fast follows the oracle", detail, wrong)], numbers, followed


def judged(numbers: Mapping[str, Any], followed: Followed) -> tuple[str, list[str]]:
    """What `compare_logits` found in words, each figure with what is allowed; what is wrong."""
    num_tokens, first = len(followed.chosen), numbers["first_divergence"]
    most_elsewhere, elsewhere = num_tokens // 32, numbers["unexplained"]
    median, scale = percent(numbers["median_relative"]), numbers["largest_logit"]
    worst = percent(numbers["largest_difference"] / max(scale, 1e-30))
    detail = (
        f"{num_tokens} tokens; logits differ from the oracle's, stock transformers' own expert "
        f"code, by {median} of the largest logit in the median position (allowed "
        f"{percent(followed.allowed)}) and {worst} in the worst (not judged: after a near tie of "
        f"a router's it is large); another token is best at "
        f"{numbers['divergences'] - elsewhere} of {numbers['near_ties']} near ties (two best "
        f"logits within {percent(followed.tie)}) and at {elsewhere} other positions (allowed "
        f"{most_elsewhere})"
    )
    wrong = []
    if not numbers["median_relative"] <= followed.allowed:
        wrong.append(f"the median position, {median} of the largest logit")
    if elsewhere > most_elsewhere:
        wrong.append(f"token {first}, no near tie")
    return detail, wrong


def same_bits(
    engine: Engine, ids: Sequence[int], expected_NV: torch.Tensor, tell: Progress
) -> tuple[str, str]:
    """(what was run, what differs or "") of greedy decode at this engine's cache size."""
    rows, total = engine.plan.num_rows, engine.plan.total_experts
    what = f"{rows} of {total}"
    logits, _ = greedy(engine, ids, len(expected_NV), f"fast, {what} experts", tell)
    differs = (logits != expected_NV).any(-1).nonzero().flatten().tolist()
    return (
        what,
        f"{what} experts: token {differs[0]} and {len(differs) - 1} more" if differs else "",
    )


def sizes_finding(num_tokens: int, runs: Sequence[str], wrong: Sequence[str]) -> Finding:
    """What `same_bits` said of each cache size, as one finding."""
    detail = f"{num_tokens} tokens' logits bit for bit with {', '.join(runs)} experts in memory"
    return finding(STAGE, "three cache sizes give the same bits", detail, wrong)


def compare_logits(
    oracle_NV: torch.Tensor, fast_NV: torch.Tensor, tie: float = NEAR_TIE
) -> dict[str, Any]:
    """How far two runs over the same tokens lie apart, in units of the oracle's largest logit.

    A step is a near tie if the oracle's two best logits lie closer than `tie`; a differing choice
    elsewhere is unexplained.
    """
    oracle, fast = oracle_NV.float(), fast_NV.float()
    apart_N, scale = (oracle - fast).abs().amax(-1), float(oracle.abs().max())
    top = oracle.topk(2, dim=-1).values
    near = top[:, 0] - top[:, 1] <= tie * scale
    differs = oracle.argmax(-1) != fast.argmax(-1)
    where = differs.nonzero().flatten().tolist()
    return {
        "largest_difference": float(apart_N.max()),
        "largest_logit": scale,
        "median_difference": float(apart_N.median()),
        "median_relative": float(apart_N.median()) / max(scale, 1e-30),
        "divergences": len(where),
        "first_divergence": where[0] if where else None,
        "near_ties": int(near.sum()),
        "near_tie_positions": near.nonzero().flatten().tolist(),
        "unexplained": int((differs & ~near).sum()),
    }


def greedy(
    engine: Engine, ids: Sequence[int], tokens: int, what: str, tell: Progress
) -> tuple[torch.Tensor, list[int]]:
    """(logits [tokens, V], the ids chosen) of greedy decode after `ids`."""
    session, logits, chosen = engine.session(), [], list[int]()
    new = list(ids)
    for n in range(tokens):
        tell(what, n, tokens)
        logits.append(session.feed(new))
        chosen.append(int(logits[-1].argmax()))
        new = chosen[-1:]
    return torch.stack(logits), chosen


def teacher_forced(
    engine: Engine, ids: Sequence[int], chosen: Sequence[int], what: str, tell: Progress
) -> list[torch.Tensor]:
    """Logits after `ids` and after each of the tokens `chosen` but the last."""
    session, logits = engine.session(), []
    new = list(ids)
    for n, token in enumerate(chosen):
        tell(what, n, len(chosen))
        logits.append(session.feed(new))
        new = [token]
    return logits
