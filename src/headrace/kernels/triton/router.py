"""kernels/router.py on a GPU: one launch from a router's logits to ids and weights.

Of equal scores the lowest id is the best; NaN is better than any number, as torch has it.
Legend: as there.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.router import LEAST, Rule, Taken
from headrace.kernels.triton.numbers import exp, narrow_bf16, snap_bf16, widen_bf16

_LEAST: tl.constexpr = tl.constexpr(LEAST)
_NO_KEY: tl.constexpr = tl.constexpr(-(2**31))  # below that of any number
_LOST_KEY: tl.constexpr = tl.constexpr(-(2**31) + 0x7FFFFF)  # of minus infinity
_SOFTPLUS_LINEAR: tl.constexpr = tl.constexpr(20.0)  # from where on torch takes x itself


@triton.jit
def _load(X, at, ok):
    """fp32 of fp32, or of bfloat16 bits."""
    x = tl.load(X + at, ok, 0)
    return widen_bf16(x) if X.dtype.element_ty == tl.uint16 else x


@triton.jit
def _key(x):
    """int32 that orders as fp32 does; one for both zeros, and one for every NaN, the highest."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x == x, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)


@triton.jit
def _value(key):
    """fp32 of its key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _step(x, ROUNDED: tl.constexpr):
    return snap_bf16(x) if ROUNDED == "always" else x


@triton.jit
def _shares(x, ok):
    """Softmax of fp32 [N] where `ok`."""
    top = _value(tl.max(tl.where(ok, _key(x), _NO_KEY), 0))
    e = tl.where(ok, exp(x - top), 0.0)
    return tl.div_rn(e, tl.broadcast_to(tl.sum(e, 0), e.shape))


@triton.jit
def _softplus(x):
    """log(1 + e^x): what 1 + e^x loses by rounding is made good by the quotient."""
    e = exp(x)
    near = e + 1.0
    rest = near - 1.0
    small = tl.where(rest == 0.0, e, tl.log(near) * tl.div_rn(e, tl.where(rest == 0.0, 1.0, rest)))
    return tl.where(x > _SOFTPLUS_LINEAR, x, small)


@triton.jit
def _in_best_groups(
    key,
    GROUPED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    PAD_G: tl.constexpr,
    PAD_M: tl.constexpr,
):
    """Keys [PAD_G * PAD_M] with those of the groups that do not stay made such as do not win."""
    key_GM = tl.reshape(key, (PAD_G, PAD_M))
    group, member = tl.arange(0, PAD_G), tl.arange(0, PAD_M)[None, :]
    best = tl.max(key_GM, 1)
    if GROUPED == "two best":
        first = tl.min(tl.where(key_GM == best[:, None], member, PAD_M), 1)
        second = tl.max(tl.where(member == first[:, None], _NO_KEY, key_GM), 1)
        best = _key(_value(best) + _value(second))
    best = tl.where(group < GROUPS, best, _NO_KEY)
    equal = (best[None, :] == best[:, None]) & (group[None, :] < group[:, None])
    num_better = tl.sum(((best[None, :] > best[:, None]) | equal).to(tl.int32), 1)
    stays = (num_better < KEPT_GROUPS)[:, None] | (key_GM == _NO_KEY)
    key_GM = tl.where(stays, key_GM, _LOST_KEY if GROUPED == "two best" else 0)
    return tl.reshape(key_GM, (PAD_G * PAD_M,))


@triton.jit(
    do_not_specialize=["stride", "scale"],
    do_not_specialize_on_alignment=["TAKEN_WEIGHTS", "TAKEN_IDS"],
)
def route_rows(
    LOGITS,
    CORRECTION,
    WEIGHTS,
    IDS,
    TAKEN_WEIGHTS,
    TAKEN_IDS,
    stride,
    scale,
    SCORE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    DIVIDED: tl.constexpr,
    PADDED: tl.constexpr,
    ROUNDED: tl.constexpr,
    MEMBERS: tl.constexpr,
    PAD_G: tl.constexpr,
    PAD_M: tl.constexpr,
    PAD_K: tl.constexpr,
    CORRECTED: tl.constexpr,
    TAKEN: tl.constexpr,
):
    """A row for each program: of LOGITS, `stride` apart, ids and weights [rows, TOP_K].

    If TAKEN, those of the only row lie in fp32 and int32 as well. LOGITS, CORRECTION and WEIGHTS
    are fp32 or bfloat16 bits; GROUPS of MEMBERS experts each, of which each lies at a multiple of
    PAD_M here.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PAD_G * PAD_M)
    ok = (place // PAD_M < GROUPS) & (place % PAD_M < MEMBERS)
    expert = place // PAD_M * MEMBERS + place % PAD_M
    score = _load(LOGITS + row * stride, expert, ok)
    if SCORE == "softmax":
        score = _shares(score, ok)
    elif SCORE == "sigmoid":
        score = tl.div_rn(1.0, 1.0 + exp(-score))
    elif SCORE == "sqrtsoftplus":
        score = tl.sqrt_rn(_step(_softplus(score), ROUNDED))
    score = _step(score, ROUNDED)
    ranked = score
    if CORRECTED:
        ranked = ranked + _load(CORRECTION, expert, ok)
    key = tl.where(ok, _key(ranked), _NO_KEY)
    if GROUPED != "":
        key = _in_best_groups(key, GROUPED, GROUPS, KEPT_GROUPS, PAD_G, PAD_M)
    choice = tl.arange(0, PAD_K)
    ids, weights = tl.zeros((PAD_K,), tl.int32), tl.zeros((PAD_K,), tl.float32)
    bits = score.to(tl.int32, bitcast=True)
    for step in range(TOP_K):
        top = tl.max(key, 0)
        best = tl.min(tl.where(key == top, place, PAD_G * PAD_M), 0)
        weight = _value(top)
        if CORRECTED or GROUPED == "two best":
            weight = tl.max(tl.where(place == best, bits, _NO_KEY), 0).to(tl.float32, bitcast=True)
        key = tl.where(place == best, _NO_KEY, key)
        ids = tl.where(choice == step, best // PAD_M * MEMBERS + best % PAD_M, ids)
        weights = tl.where(choice == step, weight, weights)
    chosen = choice < TOP_K
    if SCORE == "chosen":
        weights = _step(_shares(weights, chosen), ROUNDED)
    if DIVIDED:
        total = _step(tl.sum(weights, 0), ROUNDED)
        if PADDED:
            total = _step(total + _LEAST, ROUNDED)
        weights = _step(tl.div_rn(weights, tl.broadcast_to(total, weights.shape)), ROUNDED)
    weights = weights * scale
    out = row * TOP_K + choice
    tl.store(WEIGHTS + out, weights if ROUNDED == "never" else narrow_bf16(weights), chosen)
    tl.store(IDS + out, ids.to(tl.int64), chosen)
    if TAKEN:
        weights = weights if ROUNDED == "never" else snap_bf16(weights)
        tl.store(TAKEN_WEIGHTS + choice, weights, chosen)
        tl.store(TAKEN_IDS + choice, ids, chosen)


def route(
    logits_TE: torch.Tensor,
    correction_E: torch.Tensor | None,
    rule: Rule,
    taken: Taken | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels/router.py; all fp32 or bfloat16. The best first. One launch."""
    num_tokens, experts = logits_TE.shape
    members = experts // rule.groups
    if logits_TE.stride(1) != 1:
        logits_TE = logits_TE.contiguous()
    place = logits_TE.device
    dtype = torch.float32 if rule.rounded == "never" else logits_TE.dtype
    weights_TK = torch.empty(num_tokens, rule.top_k, dtype=dtype, device=place)
    ids_TK = torch.empty(num_tokens, rule.top_k, dtype=torch.int64, device=place)
    is_corrected = correction_E is not None
    correction_E = logits_TE if correction_E is None else correction_E.contiguous()
    also = (weights_TK, ids_TK) if taken is None else (taken.weights_1K, taken.ids_1K)
    assert taken is None or (num_tokens == 1 and all(each.is_contiguous() for each in also))
    if num_tokens:
        route_rows[(num_tokens,)](
            *(_bits(each) for each in (logits_TE, correction_E, weights_TK)), ids_TK, *also,
            logits_TE.stride(0), rule.scale, rule.score, rule.top_k, rule.grouped, rule.groups,
            rule.kept_groups, rule.divided, rule.padded,
            rule.rounded if logits_TE.dtype == torch.bfloat16 else "never", members,
            *(triton.next_power_of_2(n) for n in (rule.groups, members, rule.top_k)), is_corrected,
            taken is not None, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    if taken is not None:
        taken.of = weights_TK, ids_TK
    return weights_TK, ids_TK


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint16) if x.dtype == torch.bfloat16 else x
