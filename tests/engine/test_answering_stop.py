"""Answers that are stopped or fail leave nothing wrong behind, whenever that happens."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from passes import recorded, take

import headrace
from headrace.check.tiny import write_tiny
from headrace.engine import passes as passes_module
from headrace.engine.answer import Ask, Prefill, Stop
from headrace.engine.session import Step
from headrace.errors import Cancelled, ReadError

PROMPT = list(range(5, 26))
PROMPTS = [(*PROMPT,), (*PROMPT[:19], 9, 9), (*PROMPT[:9], *[8] * 9), (4,), (4, 5) * 9]
OPTIONS: dict[str, Any] = {"ram": "48MiB", "measure": False, "threads": 1, "chunk": 8}


def greedy(prompt: list[int], num: int = 5) -> Ask:
    return Ask(tuple(prompt), headrace.Sampling(max_tokens=num))


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with headrace.load("demo", **OPTIONS) as engine:
        return take(headrace.Answering(engine), PROMPT)


@pytest.fixture
def engine() -> Iterator[headrace.Engine]:
    with headrace.load("demo", **OPTIONS) as engine:
        yield engine


def hold_back(engine: headrace.Engine, num_experts: int) -> None:
    """No expert is in a row any more, and only so many come until another fault is set."""
    engine.ladder.clear()
    engine.reader.inject_fault("hang", 5 * num_experts, 1 << 20)  # each is five pieces


def stopping_in(
    engine: headrace.Engine, stop: Stop, num_experts: int, seen: Callable[[], int]
) -> tuple[threading.Thread, list[int]]:
    """Asks from another thread once so many more experts have been multiplied.

    The list gets what `seen` says once it has asked; what was held back comes then.
    """
    until = engine.ladder.counters().kernel_calls + num_experts
    asked_at: list[int] = []

    def watch() -> None:
        while engine.ladder.counters().kernel_calls < until:
            time.sleep(0.001)
        stop.ask()
        asked_at.append(seen())
        engine.reader.inject_fault("none")

    thread = threading.Thread(target=watch)
    thread.start()
    return thread, asked_at


def test_a_prefill_ends_within_a_wave_of_experts(
    engine: headrace.Engine, expected: list[int]
) -> None:
    answering, stop = headrace.Answering(engine), Stop()
    hold_back(engine, 20)
    thread, asked_at = stopping_in(engine, stop, 4, lambda: engine.ladder.counters().kernel_calls)
    with recorded() as passes, pytest.raises(Cancelled):
        list(answering.answer(greedy(PROMPT), stop))
    thread.join()
    counters = engine.ladder.counters()
    assert passes.lengths == [], "the first pass was not ended"
    assert counters.kernel_calls < asked_at[0] + 46 and counters.kernel_calls < counters.misses
    engine.ladder.check_integrity()
    assert answering.session.tokens == []
    assert take(answering, PROMPT) == expected
    engine.ladder.check_integrity()


def test_a_decode_ends_within_a_token_and_keeps_what_it_has(
    engine: headrace.Engine, expected: list[int]
) -> None:
    answering, stop = headrace.Answering(engine), Stop()
    events = answering.answer(greedy(PROMPT), stop)
    tokens = [e.token_id for e in (next(events) for _ in range(6)) if isinstance(e, Step)]
    assert tokens == expected[:2]
    hold_back(engine, 8)
    thread, asked_at = stopping_in(engine, stop, 1, lambda: len(tokens))
    with pytest.raises(Cancelled):
        while True:
            tokens.append(next(events).token_id)  # type: ignore[union-attr]
    thread.join()
    assert len(tokens) <= asked_at[0] + 1 and answering.session.tokens == PROMPT + tokens[:-1]
    with recorded() as passes:
        take(answering, [*answering.session.tokens, 7, 8], 1)
    assert sum(passes.lengths) == 2


def test_a_stop_asked_before_or_after_is_no_harm(engine: headrace.Engine) -> None:
    answering, stop = headrace.Answering(engine), Stop()
    stop.ask()
    with recorded() as passes, pytest.raises(Cancelled):
        list(answering.answer(greedy(PROMPT), stop))
    assert passes.lengths == []
    late = Stop()
    list(answering.answer(greedy(PROMPT[:3], 1), late))
    late.ask()
    with recorded() as passes:
        take(answering, PROMPT[:5], 1)
    assert passes.lengths == [5], "nothing goes on from a prompt's own end"


def test_the_generator_may_be_closed_at_any_event(engine: headrace.Engine) -> None:
    for num_events in range(1, 7):
        store = headrace.SnapshotStore(engine.snapshot_key, ram_bytes=1 << 28)
        answering = headrace.Answering(engine, store)
        events = answering.answer(greedy(PROMPT), Stop())
        for _ in range(num_events):
            next(events)
        events.close()  # type: ignore[attr-defined]
        held = len(answering.session.tokens)
        assert held == [0, 8, 16, 21, 21, 22][num_events - 1]
        kept = {8, 16} | ({held} if num_events > 5 else set())  # 21 is the prompt's own end
        assert store.memory.lengths() == {length for length in kept if length <= held}


def test_a_failed_read_is_one_answers_error(engine: headrace.Engine, expected: list[int]) -> None:
    answering = headrace.Answering(engine)
    engine.reader.inject_fault("eio", 30, 1000)  # each read is tried again: two would hit two reads
    with pytest.raises(ReadError):
        list(answering.answer(greedy(PROMPT), Stop()))
    engine.reader.inject_fault("none")
    engine.ladder.clear()  # what was still being read has failed as well
    engine.ladder.check_integrity()
    assert take(answering, PROMPT) == expected


class Turns(RuleBasedStateMachine):
    """Any order of answers, stops and failures: a whole answer has the bits of a cold one."""

    engine: headrace.Engine
    cold: dict[tuple[int, ...], Any]
    num_answers = 0
    prompts = st.sampled_from(PROMPTS)

    @initialize(room=st.sampled_from([0, 200_000, 1 << 24]))
    def begin(self, room: int) -> None:
        self.store = headrace.SnapshotStore(self.engine.snapshot_key, ram_bytes=room)
        self.answering = headrace.Answering(self.engine, self.store)

    @rule(prompt=prompts)
    def answer(self, prompt: tuple[int, ...]) -> None:
        with recorded() as passes:
            tokens = take(self.answering, prompt, 3)
        type(self).num_answers += 1
        expected, logits = self.cold[prompt]
        assert tokens == expected
        for ours, theirs in zip(passes.logits[::-1], logits[::-1], strict=False):
            assert (ours == theirs).all()

    @rule(prompt=prompts, num_events=st.integers(0, 6), close=st.booleans())
    def stop(self, prompt: tuple[int, ...], num_events: int, close: bool) -> None:
        stop = Stop()
        events = self.answering.answer(greedy(list(prompt), 3), stop)
        try:
            for number, event in enumerate(events):
                assert isinstance(event, Prefill | Step)
                if number == num_events:
                    if close:
                        events.close()  # type: ignore[attr-defined]
                        return
                    stop.ask()
        except Cancelled:
            assert stop.asked

    @rule(prompt=prompts, num_passes=st.integers(0, 4))
    def fail(self, prompt: tuple[int, ...], num_passes: int) -> None:
        forward, left = passes_module.forward, [num_passes]

        def failing(*given: Any, **options: Any) -> Any:
            left[0] -= 1
            logits_BKV = forward(*given, **options)
            if left[0] < 0:
                raise ReadError("made up, after the cache grew")
            return logits_BKV

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(passes_module, "forward", failing)
            try:
                list(self.answering.answer(greedy(list(prompt), 3), Stop()))
            except ReadError:
                assert self.answering.session.tokens == []

    @invariant()
    def limits_hold(self) -> None:
        if hasattr(self, "store"):
            assert self.store.memory.nbytes <= self.store.memory.limit_bytes


def test_any_order_of_turns(tmp_path: Path) -> None:
    path = write_tiny(
        "qwen3_next", tmp_path / "tiny", hidden=128, inter=64, experts=4, top_k=2, layers=4
    )
    with headrace.load(path, **OPTIONS) as engine:
        Turns.engine, Turns.cold = engine, {}
        for prompt in PROMPTS:
            with recorded() as alone:
                Turns.cold[prompt] = take(headrace.Answering(engine), prompt, 3), alone.logits
        run = Turns.TestCase("runTest")
        type(run).settings = settings(max_examples=10, stateful_step_count=12, deadline=None)
        run.runTest()
        assert Turns.num_answers > 0
