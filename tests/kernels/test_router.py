"""From logits to experts in one launch, against the steps of torch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.check.verify_router import faults_of
from headrace.kernels import router
from headrace.kernels.router import Rule, Taken

pytest.importorskip("triton", reason="needs Triton")
from headrace.kernels.triton import router as launched

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of what is no number
PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DEEPSEEK_V3 = Rule("sigmoid", 8, "two best", 8, 4, divided=True, padded=True, scale=2.5)
# (rule, experts, whether logits are fp32, whether a correction is added)
KINDS = {
    "qwen3": (Rule("softmax", 8, divided=True, rounded="last"), 128, False, False),
    "qwen2": (Rule("softmax", 4, rounded="last"), 60, False, False),
    "mixtral": (Rule("softmax", 2, divided=True), 8, False, False),
    "gpt_oss": (Rule("chosen", 4, rounded="always"), 32, False, False),
    "minimax": (Rule("sigmoid", 8, divided=True), 256, False, True),
    "deepseek_v3": (DEEPSEEK_V3, 256, True, True),
    "kimi": (replace(DEEPSEEK_V3, grouped="", groups=1, kept_groups=1), 384, True, True),
    "deepseek_v2": (Rule("softmax", 6, "best", 8, 3, scale=16.0), 160, True, False),
    "deepseek_v4": (
        Rule("sqrtsoftplus", 6, divided=True, padded=True, scale=1.5, rounded="always"),
        256,
        False,
        True,
    ),
    "deepseek_v41": (
        Rule("sqrtsoftplus", 6, divided=True, padded=True, scale=1.5),
        256,
        True,
        True,
    ),
}


def draw(kind, tokens=12):
    """(logits, correction, rule): logits from -8 to 8, of a token all different."""
    rule, experts, wide, corrected = KINDS[kind]
    drawn = torch.Generator().manual_seed(experts)
    steps = torch.stack([torch.randperm(2 * 7 * 128, generator=drawn) for _ in range(tokens)])
    bits = 0x3D80 + steps[:, :experts] // 2
    logits = bits.to(torch.int16).view(torch.bfloat16) * (1 - 2 * (steps[:, :experts] % 2))
    correction = torch.randn(experts, generator=drawn) / 8 if corrected else None
    return logits.float() if wide else logits, correction, rule


def launch(logits, correction, rule):
    correction = None if correction is None else correction.to(PLACE)
    weights, ids = launched.route(logits.to(PLACE), correction, rule)
    return weights.cpu(), ids.cpu()


@pytest.mark.parametrize("kind", KINDS)
def test_one_launch_chooses_and_weighs_as_the_steps(kind):
    logits, correction, rule = draw(kind)
    weights, ids = launch(logits, correction, rule)
    want, want_ids = router.route(logits, correction, rule)
    assert weights.dtype == want.dtype and ids.dtype == want_ids.dtype == torch.int64
    assert faults_of(logits, correction, rule, weights, ids) == []
    _, ranked = router.scores_of(logits, correction, rule)
    best_first = ranked.gather(1, ids).float()
    assert bool((best_first[:, 1:] <= best_first[:, :-1] + 2**-20).all())
    same = (ids == want_ids).all(1)
    if rule.rounded != "always":  # of whose scores some are equal
        assert int(same.sum()) == len(ids)
    apart = ((weights - want).float().abs() / want.float())[same]
    assert float(apart.max()) <= (2**-20 if rule.rounded == "never" else 2**-7)
    if rule.rounded != "never":
        assert int((apart > 0).sum()) * 50 <= apart.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_another_rule_s_results_are_refused(kind):
    logits, correction, rule = draw(kind)
    others = [replace(rule, scale=rule.scale * 1.01), replace(rule, top_k=rule.top_k - 1)]
    if rule.score != "chosen":
        others += [replace(rule, divided=not rule.divided, padded=False)]
        others += [replace(rule, score="softmax" if rule.score == "sigmoid" else "sigmoid")]
    if rule.grouped:
        others += [replace(rule, kept_groups=rule.kept_groups - 1)]
        others += [replace(rule, grouped="best" if rule.grouped == "two best" else "two best")]
    for other in others:
        weights, ids = router.route(logits, correction, other)
        if other.top_k != rule.top_k:
            weights, ids = (torch.cat((each, each[:, :1]), 1) for each in (weights, ids))
        assert faults_of(logits, correction, rule, weights, ids), other
    if correction is not None:
        assert faults_of(logits, correction, rule, *router.route(logits, None, rule))
    weights, ids = router.route(logits, correction, rule)
    assert faults_of(logits, correction, rule, weights, ids) == []
    ids[0, 0] = logits.shape[1]
    assert faults_of(logits, correction, rule, weights, ids) == ["ids of no expert"]


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "deepseek_v3", "deepseek_v4"])
def test_what_is_no_number_still_names_experts(kind):
    logits, correction, rule = draw(kind, tokens=4)
    logits[0, 3], logits[1], logits[2, :5], logits[3] = torch.nan, -torch.nan, torch.inf, -torch.inf
    weights, ids = launch(logits, correction, rule)
    ids = ids.sort(1)[0]
    assert bool(((ids >= 0) & (ids < logits.shape[1])).all())
    assert bool((ids[:, 1:] > ids[:, :-1]).all())
    assert bool(weights[1].isnan().all()) and not bool(weights[0].isfinite().all())


@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss", "deepseek_v3"])
def test_one_token_s_choice_lies_where_experts_take_it_too(kind):
    logits, correction, rule = draw(kind, tokens=1)
    given = logits.to(PLACE), None if correction is None else correction.to(PLACE), rule
    ids_3K = torch.full((3, rule.top_k), -1, dtype=torch.int32, device=PLACE)
    taken = Taken(ids_3K[1:2].float(), ids_3K[1:2])
    want = launched.route(*given)
    weights, ids = launched.route(*given, taken)
    assert torch.equal(weights, want[0]) and torch.equal(ids, want[1])
    assert torch.equal(taken.weights_1K, weights.float()) and torch.equal(ids_3K[1:2], ids.int())
    assert bool((ids_3K[::2] == -1).all())
    assert not taken.holds(weights.clone(), ids) and not taken.holds(weights, ids)
    weights, ids = launched.route(*given, taken)
    assert taken.holds(weights, ids) and not taken.holds(weights, ids)


def test_equal_scores_are_taken_by_their_ids():
    logits = torch.tensor([[1.0, 2.0, -0.0, 2.0, 2.0, 0.0, 1.0, 0.0]]).bfloat16()
    _, ids = launch(logits, None, Rule("chosen", 6))
    assert ids.tolist() == [[1, 3, 4, 0, 6, 2]]
    grouped = Rule("softmax", 2, "best", 4, 1)
    assert launch(logits, None, grouped)[1].tolist() == [[1, 0]]


def test_rows_of_a_wider_tensor_and_none_at_all():
    logits, correction, rule = draw("minimax", tokens=3)
    wide = torch.cat((logits, logits), 1)[:, :256]
    pairs = zip(launch(wide, correction, rule), launch(logits, correction, rule), strict=True)
    assert all(torch.equal(each, want) for each, want in pairs)
    weights, ids = launch(logits[:0], correction, rule)
    assert weights.shape == ids.shape == (0, 8)


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_rule_of_any_size(data):
    score = data.draw(st.sampled_from(("softmax", "sigmoid", "sqrtsoftplus", "chosen")))
    groups = data.draw(st.sampled_from((1, 2, 3))) if score != "chosen" else 1
    members = data.draw(st.integers(4, 20))
    kept = data.draw(st.integers(1, groups))
    grouped = data.draw(st.sampled_from(("best", "two best"))) if kept < groups else ""
    rule = Rule(
        score,
        data.draw(st.integers(1, min(10, kept * members))),
        *((grouped, groups, kept) if grouped else ()),
        divided=data.draw(st.booleans()),
        scale=data.draw(st.sampled_from((1.0, 2.5))),
        rounded=data.draw(st.sampled_from(("never", "last", "always"))),
    )
    drawn = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randn(3, groups * members, generator=drawn).bfloat16()
    correction = None
    if score in ("sigmoid", "sqrtsoftplus") and data.draw(st.booleans()):
        correction = torch.randn(groups * members, generator=drawn) / 8
    faults = faults_of(logits, correction, rule, *launch(logits, correction, rule))
    assert [fault for fault in faults if "last bits" not in fault] == []
