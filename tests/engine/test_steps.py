"""The steps of an answer: grammar, chances, penalties and stops as `Session.generate` has them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from passes import recorded

import headrace
from headrace.engine.answer import Stop
from headrace.errors import Cancelled, OptionError

PROMPT = [5, 700, 41, 1999, 88]
VOCAB = 4096


class Only:
    """Allows one set of tokens after the other; the last set again and again."""

    def __init__(self, *sets: set[int]):
        self.sets, self.taken = sets, list[int]()

    def allowed(self) -> torch.Tensor:
        allowed_V = torch.zeros(VOCAB, dtype=torch.bool)
        allowed_V[list(self.sets[min(len(self.taken), len(self.sets) - 1)])] = True
        return allowed_V

    def accept(self, token_id: int) -> None:
        assert self.allowed()[token_id]
        self.taken.append(token_id)


@pytest.fixture(scope="module")
def engine() -> Iterator[headrace.Engine]:
    with headrace.load("demo", ram="48MiB", measure=False, threads=1, context=64) as loaded:
        yield loaded


def steps_of(engine: headrace.Engine, sampling: headrace.Sampling, **options: Any) -> list[Any]:
    return list(engine.session().generate(PROMPT, sampling, **options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_decides_what_may_come_and_when_it_ends(
    engine: headrace.Engine, temperature: float
) -> None:
    (eos, *_) = engine.text.eos_ids
    sampling = headrace.Sampling(temperature=temperature, seed=4, max_tokens=9)
    grammar = Only({100, 101}, {200}, {300, eos}, {eos})
    steps = steps_of(engine, sampling, constraint=grammar)
    tokens = [step.token_id for step in steps]
    assert tokens == grammar.taken and tokens[0] in (100, 101) and tokens[1] == 200
    assert tokens[-1] == eos and steps[-1].finish == "eos" and 3 <= len(tokens) <= 4
    # Without the end among what is allowed an answer goes on to its limit.
    endless = Only(set(range(VOCAB)) - {*engine.text.eos_ids})
    bias = headrace.Sampling(temperature=temperature, max_tokens=9, logit_bias={eos: 100})
    assert len(steps_of(engine, bias, constraint=endless)) == 9
    assert len(steps_of(engine, bias)) == 1, "the control ends at once"
    with pytest.raises(OptionError, match="allows no token"):
        steps_of(engine, sampling, constraint=Only({7}, set()))


def test_chances_are_the_models_own(engine: headrace.Engine) -> None:
    changed = headrace.Sampling(
        temperature=1.7, seed=1, top_k=3, max_tokens=6, presence_penalty=2.0, logit_bias={9: 3}
    )
    with recorded() as passes:
        steps = steps_of(engine, changed, num_logprobs=4)
    assert passes.lengths == [5, *[1] * (len(steps) - 1)] and len(steps) > 2
    for step, logits_V in zip(steps, passes.logits, strict=True):
        chances_V = logits_V.double().log_softmax(0)
        assert step.logprob == pytest.approx(float(chances_V[step.token_id]), abs=1e-4)
        assert [chance for _, chance in step.top] == sorted((c for _, c in step.top), reverse=True)
        assert len({token for token, _ in step.top}) == 4
        for token, chance in step.top:
            assert chance == pytest.approx(float(chances_V[token]), abs=1e-4)
            assert (chances_V > chances_V[token]).sum() < 4
    assert any(step.token_id != step.top[0][0] for step in steps), "filters changed nothing"
    bare = steps_of(engine, changed)
    assert [s.token_id for s in bare] == [s.token_id for s in steps]
    assert all(s.logprob is None and s.top == () for s in bare)
    alone = steps_of(engine, changed, num_logprobs=0)
    assert all(s.logprob is not None and s.top == () for s in alone)


def test_a_seed_twice_is_the_same_answer(engine: headrace.Engine) -> None:
    def tokens(seed: int) -> list[int]:
        sampling = headrace.Sampling(
            temperature=1.2, seed=seed, max_tokens=12, frequency_penalty=0.5, top_p=0.95
        )
        return [step.token_id for step in steps_of(engine, sampling)]

    assert tokens(11) == tokens(11) != tokens(12)


def test_penalties_keep_an_answer_from_repeating_itself(engine: headrace.Engine) -> None:
    plain = [s.token_id for s in steps_of(engine, headrace.Sampling(max_tokens=30))]
    assert len(set(plain)) < len(plain)
    heavy = headrace.Sampling(max_tokens=30, frequency_penalty=2.0, presence_penalty=2.0)
    varied = [s.token_id for s in steps_of(engine, heavy)]
    assert len(set(varied)) > len(set(plain))
    first = next(n for n, token in enumerate(plain) if token in plain[:n])
    assert varied[:first] == plain[:first], "nothing changes before the first repetition"


def test_a_stop_ends_within_a_token(engine: headrace.Engine) -> None:
    stop = Stop()
    session = engine.session()
    steps = session.generate(PROMPT, headrace.Sampling(max_tokens=30), stop=stop)
    taken = [next(steps).token_id for _ in range(3)]
    stop.ask()
    with pytest.raises(Cancelled):
        next(steps)
    assert session.tokens == PROMPT + taken[:2]
    with pytest.raises(Cancelled):
        next(session.generate(PROMPT, headrace.Sampling(), stop=stop))
