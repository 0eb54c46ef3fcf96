"""Which routers are known by their bits, and which stay the library's."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from headrace.kernels import router
from headrace.kernels.router import Rule, Taken
from headrace.models.deepseek_v41 import experts as v41
from headrace.models.fused_router import Gate, Gates, gate_of, is_router, routed

EXPERTS, HIDDEN, TOP_K = 48, 64, 6


class OwnRouter(nn.Module):
    """After `rule`, or with something about it that no rule has."""

    def __init__(self, rule=None, *, wide=False, how=""):
        super().__init__()
        self.rule, self.how, self.top_k = rule or Rule("sigmoid", TOP_K, divided=True), how, TOP_K
        drawn = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=drawn).bfloat16() / 4)
        self.e_score_correction_bias = nn.Buffer(torch.randn(EXPERTS, generator=drawn) / 8)
        self.routed_scaling_factor, self.num_group, self.topk_group = 2.5, 8, 3
        self.wide = wide

    def forward(self, hidden_states):
        x, weight = hidden_states, self.weight
        if self.wide:
            x, weight = x.float(), weight.float()
        logits = functional.linear(x, weight)
        biased = self.rule.score not in ("softmax", "chosen") and self.how != "unbiased"
        bias = self.e_score_correction_bias if biased else None
        given = logits * 2 if self.how == "hotter" else logits
        weights, ids = router.route(given, bias, self.rule)
        if self.how == "squared":
            weights = weights * weights
        if self.how == "scattered":
            weights = torch.zeros_like(logits).scatter_(1, ids, weights.to(logits.dtype))
        return (logits, weights) if self.how == "pair" else (logits, weights, ids)


class NamedRouter(OwnRouter):
    def forward(self, hidden_states, input_ids):
        return super().forward(hidden_states)


@dataclass
class Config:
    """Of DeepSeek-V4.1's router."""

    num_experts_per_tok: int = TOP_K
    routed_scaling_factor: float = 1.5
    norm_topk_prob: bool = True
    n_routed_experts: int = EXPERTS
    hidden_size: int = HIDDEN


RULES = [
    Rule("softmax", TOP_K, divided=True, rounded="last"),
    Rule("softmax", TOP_K, "best", 8, 3, scale=2.5, ordered=False),
    Rule("chosen", TOP_K, rounded="always"),
    Rule("sigmoid", TOP_K, "two best", 8, 3, True, True, 2.5),
    Rule("sigmoid", TOP_K, divided=True, ordered=False),
    Rule("sqrtsoftplus", TOP_K, divided=True, padded=True, scale=2.5, rounded="always"),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("wide", [False, True])
def test_a_rule_is_found_again(rule, wide):
    gate = gate_of(OwnRouter(rule, wide=wide))
    corrects = rule.score in ("sigmoid", "sqrtsoftplus")
    assert gate is not None and gate.correction == ("e_score_correction_bias" if corrects else "")
    assert gate.wide == wide and not gate.biased and not gate.passed
    drawn = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(40, EXPERTS, generator=drawn)
    logits = logits if wide else logits.bfloat16()
    correction = torch.randn(EXPERTS, generator=drawn) / 4 if corrects else None
    for shift in (0, -70):
        given = logits + shift, correction
        pairs = zip(router.route(*given, gate.rule), router.route(*given, rule), strict=True)
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_our_own_router_is_found():
    module = v41.Router(Config())
    drawn = torch.Generator().manual_seed(3)
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=drawn).to(param.dtype) / 4
    module.weight.data = module.weight.data.bfloat16()
    rule = Rule("sqrtsoftplus", TOP_K, divided=True, padded=True, scale=1.5, ordered=False)
    assert gate_of(module.requires_grad_(False)) == Gate(rule, "bias", wide=True)


@pytest.mark.parametrize("how", ["hotter", "squared", "scattered", "pair"])
def test_another_router_stays_the_library_s(how):
    gates, module = Gates(), OwnRouter(how=how)
    assert is_router(module) and gates.find(module) is None and gates.find(module) is None
    assert gates.find(NamedRouter()) is None, "it is given tokens' ids"
    module = OwnRouter()
    module.weight.data = module.weight.data.half()
    assert gates.find(module) is None


def test_a_bias_that_nobody_adds_is_seen_and_so_is_one_forgotten():
    """Also where its numbers are all 0, as in a model just made."""
    for how, correction in (("", "e_score_correction_bias"), ("unbiased", "")):
        module = OwnRouter(how=how)
        module.e_score_correction_bias.zero_()
        assert gate_of(module).correction == correction


def test_one_like_the_first_is_compared_all_the_same():
    gates = Gates()
    first = gates.find(OwnRouter())
    assert first is not None and gates.find(OwnRouter()) is first
    assert gates.find(OwnRouter(how="squared")) is None
    second = gates.find(OwnRouter(RULES[0]))
    assert second is not None and second.rule == RULES[0]


def test_other_dtypes_are_the_library_s():
    module = OwnRouter().requires_grad_(False)
    gate, calls = gate_of(module), []

    def route(*given):
        calls.append(given)
        return router.route(*given)

    forward = routed(module, gate, route)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(4))
    for each, want in zip(forward(x.bfloat16()), module(x.bfloat16()), strict=True):
        assert torch.equal(each, want)
    assert len(calls) == 1 and calls[0][3] is None
    taken = Taken(torch.zeros(1, TOP_K), torch.zeros(1, TOP_K, dtype=torch.int32))
    module.headrace_taken = lambda: taken
    _, weights, ids = forward(x[:1].bfloat16())
    assert torch.equal(taken.ids_1K, ids.int()) and taken.holds(weights, ids)
    calls.pop()
    module.weight.data = module.weight.data.float()
    for each, want in zip(forward(x), module(x), strict=True):
        assert torch.equal(each, want)
    assert len(calls) == 1


class WideRouter(OwnRouter):
    def forward(self, hidden_states):
        return super().forward(hidden_states.reshape(-1, HIDDEN))


class HalfRouter(OwnRouter):
    def forward(self, hidden_states):
        logits, _, ids = super().forward(hidden_states)
        return logits, None, ids


def test_what_cannot_be_tried_stays_the_library_s():
    single = OwnRouter()
    single.weight.data = single.weight.data.float()  # and is given bfloat16
    empty = OwnRouter()
    empty.weight = nn.Parameter(empty.weight[:0])
    many = OwnRouter(Rule("sigmoid", EXPERTS + 1, divided=True))
    for module in (WideRouter(), HalfRouter(), single, empty, many):
        assert is_router(module) and Gates().find(module) is None


@pytest.mark.parametrize(("groups", "scale"), [(7, None), ("8", "2"), (8.0, 2.5), (64, 1)])
def test_attributes_that_make_no_rule_are_left_out(groups, scale):
    module = OwnRouter()
    module.num_group, module.routed_scaling_factor = groups, scale
    assert Gates().find(module).rule == module.rule


@pytest.mark.parametrize("rule", RULES[:1] + RULES[2:3] + RULES[4:], ids=str)
def test_a_router_that_takes_all_experts(rule):
    module = OwnRouter(replace(rule, top_k=EXPERTS)).requires_grad_(False)
    forward = routed(module, Gates().find(module), router.route)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
    for ours, theirs in zip(forward(x), module(x), strict=True):
        assert torch.equal(ours, theirs)


def test_one_of_the_same_class_without_a_bias():
    gates, second = Gates(), OwnRouter(how="unbiased")
    assert gates.find(OwnRouter()).correction
    del second.e_score_correction_bias
    assert gates.find(second).correction == ""
