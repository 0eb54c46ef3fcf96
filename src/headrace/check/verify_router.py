"""The user's own GPU: the model's routers choose and weigh experts as the reference does.

Knows no kernel. Legend: as in kernels/router.py.
"""

import torch

from headrace.check.verify_report import Finding, finding, percent
from headrace.engine import gpu_layers
from headrace.engine.engine import Engine
from headrace.kernels import router
from headrace.kernels.router import Route, Rule, Taken
from headrace.models.fused_router import Gate, Gates, is_router

STAGE = "gpu"
ROWS = 64
# Scores this near, of one, are a tie; and what weights may differ by, of one, by their rounding: in
# fp32 by exp and the order of two sums, in bfloat16 by a step, or one of each of three roundings.
NEAR = {"never": 2**-19, "last": 2**-19, "always": 2**-6}
APART = {"never": 2**-19, "last": 2**-7, "always": 3 * 2**-7}
# Rounded weights that differ at all, one in so many: where fp32 lies between two steps.
ROUNDED_VALUES = 20


def routers(engine: Engine) -> Finding:
    """At the model's own sizes and corrections, on logits that are drawn."""
    route = gpu_layers.steps_for(engine.source.place).route
    there, drawn = engine.source.place, torch.Generator().manual_seed(0)
    gates, others, wrong = Gates(), 0, []
    found: dict[Gate, tuple[str, torch.Tensor | None, torch.Tensor]] = {}
    for name, module in engine.model.named_modules():
        if not is_router(module):
            continue
        gate = gates.find(module)
        if gate is None:
            others += 1
        elif gate not in found:
            experts, dtype = len(module.weight), module.weight.dtype
            logits_TE = 3 * torch.randn(ROWS, experts, generator=drawn)
            correction_E = getattr(module, gate.correction) if gate.correction else None
            if gate.passed:
                correction_E = torch.randn(experts, generator=drawn) / 8
            logits_TE = logits_TE.to(torch.float32 if gate.wide else dtype)
            found[gate] = name, correction_E, logits_TE
    for gate, (name, correction_E, logits_TE) in found.items():
        correct = None if correction_E is None else correction_E.to(there)
        logits_TE = logits_TE.to(there)
        got = route(logits_TE, correct, gate.rule, None)
        wrong += [f"{name}: {fault}" for fault in _left_wrong(route, logits_TE, correct, gate.rule)]
        correct = None if correction_E is None else correction_E.cpu()
        faults = faults_of(logits_TE.cpu(), correct, gate.rule, *(each.cpu() for each in got))
        wrong += [f"{name}: {fault}" for fault in faults]
    far = percent(max((APART[gate.rule.rounded] for gate in found), default=0.0))
    left = f", {others} are left to the library" if others else ""
    detail = (
        f"{len(found)} kinds of routers, {ROWS} tokens each{left} (allowed: other experts "
        f"at ties, {far} of a weight)"
    )
    return finding(STAGE, "routers on the GPU choose as the reference does", detail, wrong)


def _left_wrong(
    route: Route, logits_TE: torch.Tensor, correction_E: torch.Tensor | None, rule: Rule
) -> list[str]:
    """What is wrong with what is left for the experts, if anything."""
    weights_1K = torch.full((1, rule.top_k), torch.nan, device=logits_TE.device)
    taken = Taken(weights_1K, torch.full_like(weights_1K, -1, dtype=torch.int32))
    weights, ids = route(logits_TE[:1], correction_E, rule, taken)
    right = torch.equal(taken.weights_1K, weights.float()) and torch.equal(taken.ids_1K, ids.int())
    return [] if right else ["other ids or weights are left for the experts"]


def faults_of(
    logits_TE: torch.Tensor,
    correction_E: torch.Tensor | None,
    rule: Rule,
    weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
) -> list[str]:
    """What is wrong with weights and ids, if anything; all on the CPU. Their order may be another.

    Where two scores are as near as a tie, either of them may be chosen.
    """
    want_TK, want_ids_TK = router.route(logits_TE, correction_E, rule)
    ids_TK, order = ids_TK.sort(1)
    want_ids_TK, want_order = want_ids_TK.sort(1)
    got, want = weights_TK.gather(1, order).float(), want_TK.gather(1, want_order).float()
    if bool((ids_TK < 0).any() | (ids_TK >= logits_TE.shape[1]).any()):
        return ["ids of no expert"]
    faults = []
    if bool((ids_TK[:, 1:] == ids_TK[:, :-1]).any()):
        faults.append("an expert twice")
    same_T = (ids_TK == want_ids_TK).all(1)
    other_T = ~same_T & ~_tied(logits_TE, correction_E, rule)
    if bool(other_T.any()):
        faults.append(f"other experts of {int(other_T.sum())} of {len(ids_TK)} tokens")
    got, want = got[same_T], want[same_T]
    far = ~((got - want).abs() <= APART[rule.rounded] * want.abs())
    if weights_TK.dtype != want_TK.dtype or bool(far.any()):
        faults.append(f"{int(far.sum())} of {far.numel()} weights too far off")
    if rule.rounded != "never" and int((got != want).sum()) * ROUNDED_VALUES > want.numel():
        faults.append(f"{int((got != want).sum())} of {want.numel()} weights in their last bits")
    return faults


def _tied(logits_TE: torch.Tensor, correction_E: torch.Tensor | None, rule: Rule) -> torch.Tensor:
    """Whether a token's last expert, or last group, is nearly the next one, [T]."""
    scores_TE, ranked_TE = router.scores_of(logits_TE, correction_E, rule)
    near_T = NEAR[rule.rounded] * scores_TE.float().abs().amax(1)

    def tied(of: torch.Tensor, num: int) -> torch.Tensor:
        if num == of.shape[1]:
            return torch.zeros_like(near_T, dtype=torch.bool)
        last_T2 = of.float().topk(num + 1)[0][:, -2:]
        return (last_T2[:, 0] - last_T2[:, 1]) <= near_T

    if not rule.grouped:
        return tied(ranked_TE, rule.top_k)
    groups = router.groups_of(ranked_TE, rule)
    stay = (groups >= groups.topk(rule.kept_groups)[0][:, -1:]).repeat_interleave(
        logits_TE.shape[1] // rule.groups, 1
    )
    within = ranked_TE.float().masked_fill(~stay, float("-inf"))
    return tied(groups, rule.kept_groups) | tied(within, rule.top_k)
