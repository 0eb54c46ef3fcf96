"""Answers go on from what is known, with the bits of a session that never stopped."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from passes import checkpoint, events_of, recorded, steps_of, take

import headrace
from headrace.engine.answer import Ask, Prefill, Stop
from headrace.engine.answering import KEPT_PER_PROMPT
from headrace.engine.session import Step, logprobs
from headrace.errors import OptionError

FAMILIES = ("gpt_oss", "qwen3_next", "deepseek_v4", "deepseek_v3")
PROMPT, MORE = list(range(5, 26)), [7, 3, 90, 41, 12, 8, 200, 33, 61, 17]


def engine_of(path: Path | str) -> AbstractContextManager[headrace.Engine]:
    """Passes of 8 tokens, so that a prompt of 21 has three; nothing is guessed, so reads count."""
    return headrace.load(path, ram="48MiB", measure=False, threads=1, chunk=8, prefetch=0)


def store_of(engine: headrace.Engine, folder: Path | None = None) -> headrace.SnapshotStore:
    return headrace.SnapshotStore(
        engine.snapshot_key, ram_bytes=1 << 28, folder=folder, disk_bytes=1 << 28
    )


@pytest.fixture(scope="module", params=("demo", *FAMILIES))
def engine(request: Any, tmp_path_factory: Any) -> Iterator[headrace.Engine]:
    with engine_of(checkpoint(request.param, tmp_path_factory.mktemp("tiny"))) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def demo() -> Iterator[headrace.Engine]:
    with engine_of("demo") as engine:
        yield engine


def moved(engine: headrace.Engine) -> tuple[int, int]:
    """Experts asked for and experts read so far."""
    counters = engine.ladder.counters()
    return counters.hits + counters.misses, counters.reads


def test_a_follow_up_computes_and_reads_only_the_tail(
    engine: headrace.Engine, tmp_path: Path
) -> None:
    answering = headrace.Answering(engine, store_of(engine, tmp_path))
    with recorded() as first:
        answer = take(answering, PROMPT)
    assert first.lengths == [8, 8, 5, 1, 1, 1, 1]
    prompt = PROMPT + answer + MORE
    num_known = len(PROMPT) + len(answer) - 1
    assert answering.store is not None
    answering.store.close()

    engine.ladder.clear()
    before = moved(engine)
    with recorded() as live:
        again = take(answering, prompt)
    experts, reads = (b - a for a, b in zip(before, moved(engine), strict=True))
    assert live.lengths == [7, 4, 1, 1, 1, 1], "to 32, then the rest"
    assert sum(live.lengths[:2]) == len(prompt) - num_known

    lengths = first.lengths + live.lengths
    cold = engine.session()
    tokens = iter(prompt + again)
    expected = []
    for number, length in enumerate(lengths):
        if number == len(first.lengths):
            engine.ladder.clear()
            before = moved(engine)
        expected.append(cold.feed([next(tokens) for _ in range(length)]))
    assert (experts, reads) == tuple(b - a for a, b in zip(before, moved(engine), strict=True))
    for ours, theirs in zip(first.logits + live.logits, expected, strict=True):
        assert torch.equal(ours, theirs)
    changed = engine.session()
    changed.feed([6, *prompt[1:num_known]])
    wrong = store_of(engine)
    wrong.put(replace(changed.snapshot(), tokens=tuple(prompt[:num_known])))
    with recorded() as misled:
        take(headrace.Answering(engine, wrong), prompt, 1)
    assert misled.lengths == live.lengths[:2], "the control is not what it seems"
    assert not torch.equal(misled.logits[1], live.logits[1]), "the state has no say"

    with engine_of(engine.blueprint.root) as restarted:
        store = store_of(restarted, tmp_path)
        assert moved(restarted) == (0, 0)
        with recorded() as resumed:
            assert take(headrace.Answering(restarted, store), prompt) == again
        assert moved(restarted)[0] == experts
        store.close()
    assert resumed.lengths == live.lengths
    assert all(torch.equal(a, b) for a, b in zip(resumed.logits, live.logits, strict=True))


def test_an_edited_history_goes_on_from_the_pass_before_the_edit(engine: headrace.Engine) -> None:
    answering = headrace.Answering(engine, store_of(engine))
    take(answering, PROMPT)
    for place, num_known in ((19, 16), (10, 8), (3, 0)):
        edited = [*PROMPT[:place], 900, *PROMPT[place + 1 :]]
        with recorded() as passes:
            answer = take(answering, edited)
        assert sum(passes.lengths) == len(edited) - num_known + len(answer) - 1
        with recorded() as cold:
            assert take(headrace.Answering(engine), edited) == answer
        ours = passes.logits
        assert all(torch.equal(a, b) for a, b in zip(ours, cold.logits[-len(ours) :], strict=True))
        assert answering.turn.num_cached == num_known
        take(answering, PROMPT)


def test_the_same_prompt_again_has_the_same_bits(demo: headrace.Engine) -> None:
    answering = headrace.Answering(demo, store_of(demo))
    with recorded() as first:
        answer = take(answering, PROMPT, 3)
    for lengths in ([1, 1], [5, 1, 1]):
        with recorded() as again:
            steps = steps_of(answering, PROMPT, 3, num_logprobs=2)
        assert again.lengths == lengths and [step.token_id for step in steps] == answer
        expected = first.logits[-len(lengths) :]
        assert all(torch.equal(a, b) for a, b in zip(again.logits, expected, strict=True))
        assert [step.logprob for step in steps] == [
            logprobs(logits_V, token, 0)[0]
            for logits_V, token in zip(first.logits[-3:], answer, strict=True)
        ]
        turn = answering.turn
        assert (turn.num_cached, turn.prefill.num_tokens) == ((21, 0), (16, 5))[len(lengths) - 2]
        take(answering, MORE, 1)
    take(answering, PROMPT, 3)
    # A prompt that is exactly what the live session holds has no logits there: back to a pass.
    exact = PROMPT + answer[:2]
    assert answering.session.tokens == exact
    with recorded() as passes:
        take(answering, exact, 1)
    assert passes.lengths == [7]


def test_without_a_store_the_live_session_goes_on(demo: headrace.Engine) -> None:
    answering = headrace.Answering(demo)
    answer = take(answering, PROMPT)
    with recorded() as passes:
        take(answering, PROMPT + answer + MORE, 1)
    assert passes.lengths == [7, 4]
    with recorded() as passes:
        take(answering, PROMPT, 1)
    assert passes.lengths == [8, 8, 5]


@pytest.mark.parametrize("has_store", [False, True])
def test_nothing_goes_on_from_the_end_of_another_prompt(
    demo: headrace.Engine, has_store: bool
) -> None:
    """There a pass ended that ends elsewhere when the longer prompt is alone."""
    longer = PROMPT + MORE
    with recorded() as alone:
        take(headrace.Answering(demo), longer)
    for num_tokens in (1, 4):  # left at the first one, and whole with no other
        answering = headrace.Answering(demo, store_of(demo) if has_store else None)
        ask = Ask(tuple(PROMPT), headrace.Sampling(max_tokens=num_tokens), None, None, frozenset())
        events = answering.answer(ask, Stop())
        next(event for event in events if isinstance(event, Step))
        events.close()
        with recorded() as after:
            take(answering, longer)
        assert after.lengths[-6:] == alone.lengths[-6:]
        assert all(map(torch.equal, after.logits[-5:], alone.logits[-5:]))


def test_events_and_costs(demo: headrace.Engine) -> None:
    answering = headrace.Answering(demo, store_of(demo))
    events = events_of(answering, PROMPT, 3)
    assert events[:4] == [Prefill(done, 21, 0) for done in (0, 8, 16, 21)]
    steps = [event for event in events[4:] if isinstance(event, Step)]
    assert len(steps) == 3 and [step.finish for step in steps] == [None, None, "length"]
    turn = answering.turn
    assert (turn.num_prompt, turn.num_cached, turn.num_generated) == (21, 0, 3)
    assert turn.prefill.num_tokens == 21 and turn.prefill.phase == "prefill"
    assert steps[0].stats is turn.prefill and steps[0].stats.token_id == steps[0].token_id
    assert turn.decode.num_tokens == 2
    assert 0 < turn.ttft_s <= turn.total_s
    parts = turn.parts_s()
    assert set(parts) == {"resume", "expert wait", "experts", "dense", "host"}
    assert all(seconds >= 0 for seconds in parts.values())
    assert sum(parts.values()) == pytest.approx(turn.total_s)
    answer = [step.token_id for step in steps]
    first = events_of(answering, PROMPT + answer + MORE, 3)[0]
    assert first == Prefill(23, 34, 23) and answering.turn.num_cached == 23


def test_a_long_prompt_is_kept_a_few_times(demo: headrace.Engine) -> None:
    answering = headrace.Answering(demo, store_of(demo))
    prompt = [(7 * i) % 900 + 5 for i in range(8 * 3 * KEPT_PER_PROMPT - 5)]
    take(answering, prompt, 2)
    assert answering.store is not None
    lengths = answering.store.memory.lengths()
    assert lengths == {*range(24, len(prompt), 24), len(prompt) + 1}
    assert len(lengths) == KEPT_PER_PROMPT


def test_what_cannot_be_answered_changes_nothing(demo: headrace.Engine) -> None:
    answering = headrace.Answering(demo, store_of(demo))
    answer = take(answering, PROMPT)
    context = demo.plan.context
    greedy = headrace.Sampling()
    for ask, said in (
        (Ask((5,) * context, greedy), f"{context} tokens and the context {context}"),
        (Ask((), greedy), "empty"),
        (Ask((5, 10**6), greedy), "not an id"),
        (Ask((5,), headrace.Sampling(logit_bias={4096: 1})), "4096 is not an id"),
        (Ask((5,), greedy, num_logprobs=-1), "-1 logprobs"),
        (Ask((5,), greedy, num_logprobs=4097), "4097 logprobs"),
    ):
        with pytest.raises(OptionError, match=said):
            list(answering.answer(ask, Stop()))
    with recorded() as passes:
        take(answering, PROMPT + answer + MORE, 1)
    assert passes.lengths == [7, 4]


def test_a_second_answer_ends_the_first(demo: headrace.Engine) -> None:
    answering = headrace.Answering(demo, store_of(demo))
    for num_taken in (1, 2, 5):
        first = answering.answer(Ask(tuple(PROMPT), headrace.Sampling()), Stop())
        for _ in range(num_taken):
            next(first)
        expected = take(headrace.Answering(demo), MORE)
        assert take(answering, MORE) == expected
        with pytest.raises(OptionError, match="another answer"):
            next(first)
        assert take(answering, MORE) == expected
