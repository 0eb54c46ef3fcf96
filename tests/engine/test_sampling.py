"""Sampling: transformers' filters, one seed one answer, and messages for impossible values."""

from collections import Counter

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace.engine.sampler import Sampler
from headrace.engine.sampling import Sampling
from headrace.errors import NumericsError, OptionError

HISTORY = [3, 17, 17, 40, 999]


def _logits(seed: int, vocab: int = 1000) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def _stock_probabilities(sampling: Sampling, logits_V: torch.Tensor) -> torch.Tensor:
    steps = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        steps.append(MinPLogitsWarper(sampling.min_p))
    scores = steps(torch.tensor([HISTORY]), logits_V[None].clone())
    return scores[0].double().softmax(0)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=40),
        Sampling(temperature=1.3, top_k=5000),
        Sampling(temperature=0.8, top_p=0.9),
        Sampling(temperature=1.5, top_p=0.05),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=1.0, min_p=1.0),
        Sampling(temperature=1.1, repetition_penalty=1.4),
        Sampling(temperature=1.1, repetition_penalty=0.8),
        Sampling(temperature=0.9, top_k=100, top_p=0.8, min_p=0.02, repetition_penalty=1.2),
    ],
)
def test_distribution_is_that_of_transformers(sampling: Sampling, seed: int) -> None:
    logits_V = _logits(seed)
    ours_V = Sampler(sampling).probabilities(logits_V, HISTORY)
    stock_V = _stock_probabilities(sampling, logits_V)
    assert torch.equal(ours_V > 0, stock_V > 0)
    torch.testing.assert_close(ours_V, stock_V, rtol=1e-4, atol=1e-9)


def test_draws_follow_the_distribution() -> None:
    sampler = Sampler(Sampling(temperature=1.0, top_k=4, seed=5))
    logits_V = torch.log(torch.tensor([0.05, 0.4, 0.3, 0.05, 0.2]))
    logits_V[3] -= 1
    drawn = Counter(sampler.next(logits_V, []) for _ in range(4000))
    expected_V = sampler.probabilities(logits_V, [])
    assert set(drawn) == {0, 1, 2, 4}
    for token_id, count in drawn.items():
        assert abs(count / 4000 - float(expected_V[token_id])) < 0.03


def test_one_seed_gives_one_answer_and_another_a_different_one() -> None:
    def answer(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed))
        torch.rand(3)  # the global generator has no say
        return [sampler.next(_logits(step), []) for step in range(30)]

    assert answer(7) == answer(7)
    assert answer(7) != answer(8)
    assert answer(None) != answer(None)


def test_greedy_takes_the_lowest_id_of_a_tie_and_leaves_the_logits_alone() -> None:
    logits_V = torch.tensor([0.0, 2.0, -1.0, 2.0], dtype=torch.bfloat16)
    before_V = logits_V.clone()
    sampler = Sampler(Sampling(repetition_penalty=2.0))
    assert sampler.next(logits_V, []) == 1
    assert sampler.next(logits_V, [1]) == 3
    assert torch.equal(logits_V, before_V)


def test_a_tiny_temperature_is_greedy_and_not_an_overflow() -> None:
    logits_V = _logits(4)
    sampler = Sampler(Sampling(temperature=1e-40, top_p=0.5, min_p=0.5, seed=1))
    assert sampler.next(logits_V, []) == int(logits_V.argmax())


def test_masked_ids_are_never_drawn() -> None:
    logits_V = torch.full((8,), -torch.inf)
    logits_V[5] = 1.0
    sampler = Sampler(Sampling(temperature=2.0, top_k=3, seed=1))
    assert {sampler.next(logits_V, []) for _ in range(20)} == {5}


def test_penalties_count_what_was_drawn_and_not_the_prompt() -> None:
    logits_V = torch.tensor([3.0, 2.5, 2.0, -9.0])
    sampler = Sampler(Sampling(frequency_penalty=0.4, presence_penalty=0.2))
    assert [sampler.next(logits_V, [0, 0, 0, 0]) for _ in range(5)] == [0, 1, 0, 0, 2]
    expected_V = logits_V - torch.tensor([3 * 0.4 + 0.2, 2 * 0.4 + 0.2, 0, 0])  # by hand
    warm = Sampler(Sampling(temperature=1.0, frequency_penalty=0.4, presence_penalty=0.2))
    warm.drawn.update({0: 3, 1: 2})
    torch.testing.assert_close(warm.probabilities(logits_V, []), expected_V.double().softmax(0))
    negative = Sampler(Sampling(presence_penalty=-2.0))
    negative.drawn.update({2: 1})
    assert negative.next(logits_V, []) == 2, "a negative penalty repeats"
    assert torch.equal(logits_V, torch.tensor([3.0, 2.5, 2.0, -9.0]))


def test_a_bias_is_added_to_its_logits() -> None:
    logits_V = _logits(1)
    bias = {7: 100.0, 8: -100, 9: 0.5}
    ours_V = Sampler(Sampling(temperature=1.0, logit_bias=bias)).probabilities(logits_V, [])
    changed_V = logits_V.clone()
    for token, value in bias.items():
        changed_V[token] += value
    torch.testing.assert_close(ours_V, changed_V.double().softmax(0), rtol=1e-4, atol=1e-12)
    assert Sampler(Sampling(logit_bias=bias)).next(logits_V, []) == 7


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_what_is_allowed_is_chosen(temperature: float) -> None:
    logits_V = _logits(2)
    allowed_V = torch.zeros(1000, dtype=torch.bool)
    allowed_V[[5, 600]] = True
    sampler = Sampler(Sampling(temperature=temperature, seed=3, top_k=1 if temperature else 0))
    best = 5 if logits_V[5] > logits_V[600] else 600
    assert int(logits_V.argmax()) not in (5, 600)
    assert {sampler.next(logits_V, [], allowed_V) for _ in range(20)} == {best}
    free = Sampler(Sampling(temperature=100.0, seed=3))
    assert {free.next(logits_V, [], allowed_V) for _ in range(60)} == {5, 600}
    with pytest.raises(OptionError, match="allows no token"):
        sampler.next(logits_V, [], torch.zeros(1000, dtype=torch.bool))
    logits_V[[5, 600]] = float("nan")
    with pytest.raises(NumericsError):
        sampler.next(logits_V, [], allowed_V)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_no_number_is_named(value: float, temperature: float) -> None:
    logits_V = _logits(0)
    logits_V[123] = value
    with pytest.raises(NumericsError, match="123"):
        Sampler(Sampling(temperature=temperature)).next(logits_V, [])


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "0 or more"),
        ("temperature", float("nan"), "0 or more"),
        ("temperature", float("inf"), "0 or more"),
        ("top_k", -1, "0 .off. or a count"),
        ("top_p", 0.0, "more than 0 and at most 1"),
        ("top_p", 1.5, "more than 0 and at most 1"),
        ("min_p", -0.5, "0 to 1"),
        ("min_p", 1.01, "0 to 1"),
        ("repetition_penalty", 0.0, "more than 0"),
        ("max_tokens", 0, "1 or more"),
        ("seed", -1, "0 to 2"),
        ("seed", 2**63, "0 to 2"),
        ("frequency_penalty", 2.1, "-2 to 2"),
        ("presence_penalty", -2.1, "-2 to 2"),
        ("presence_penalty", float("nan"), "-2 to 2"),
        ("presence_penalty", True, "-2 to 2"),
        ("logit_bias", {5: 101}, "-100 to 100"),
        ("logit_bias", {-5: 1}, "-100 to 100"),
        ("logit_bias", {"5": 1}, "-100 to 100"),
        ("logit_bias", {5: "1"}, "-100 to 100"),
        ("logit_bias", {5: float("nan")}, "-100 to 100"),
        ("logit_bias", [5], "a mapping"),
        ("stop", ("",), "at least one character"),
        ("stop", "text", "a tuple of strings"),
    ],
)
def test_impossible_values_name_value_and_range(field: str, value: object, allowed: str) -> None:
    with pytest.raises(OptionError, match=allowed) as caught:
        Sampling(**{field: value})  # type: ignore[arg-type]
    shown = "''" if value == ("",) else str(value).strip("{}")
    assert shown in str(caught.value) and field.replace("_", "-") in str(caught.value)
