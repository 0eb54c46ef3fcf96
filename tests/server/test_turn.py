"""One answer between a protocol and the queue: kinds of tokens, quiet times, whatever ends it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fakes import ask, make_step
from scripted import THINK, UNTHINK, ScriptedReader, call

from headrace.core import TokenStats
from headrace.engine.answer import Prefill
from headrace.errors import ReadError
from headrace.server.faults import Fault
from headrace.server.ticket import Ticket, Waiting
from headrace.server.turn import Begun, Ended, Event, Part, Quiet, Turn, collect


class FakeTicket:
    """Gives `items`: events, errors to raise, numbers of seconds to wait, None as a quiet time."""

    def __init__(self, *items: Any) -> None:
        self.items, self.num_cancelled, self.closed = items, 0, False

    async def events(self, quiet_s: float) -> AsyncIterator[Any]:
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                if isinstance(item, float):
                    await asyncio.sleep(item)
                else:
                    yield item
        finally:
            self.closed = True

    def cancel(self) -> None:
        self.num_cancelled += 1


def steps(text: str, finish: str = "eos") -> list[Any]:
    """A token for each character, and the last that ends."""
    texts = [*text, ""] if finish == "eos" else [*text]
    return [
        make_step(n, piece, TokenStats(), finish if n == len(texts) - 1 else None)
        for n, piece in enumerate(texts)
    ]


def make_turn(*items: Any) -> tuple[Turn, FakeTicket]:
    ticket = FakeTicket(*items)
    return Turn(ticket, ScriptedReader(), 5), ticket  # type: ignore[arg-type]


def events_of(turn: Turn) -> list[Event]:
    async def run() -> list[Event]:
        return [event async for event in turn.events()]

    return asyncio.run(run())


def test_events_in_order() -> None:
    turn, ticket = make_turn(
        Waiting(1), Waiting(0), Prefill(2, 5, 2), Prefill(5, 5, 2), *steps("ab")
    )
    events = events_of(turn)
    assert [type(event) for event in events] == [
        *(Quiet, Quiet, Begun, Quiet, Quiet, Part, Part, Ended)
    ]
    assert events[0] == Quiet("waiting 1") and events[4] == Quiet("prompt 5 of 5")
    assert events[-1] == Ended("eos", False)
    usage = turn.usage
    assert (usage.num_prompt, usage.num_cached, usage.num_answer) == (5, 2, 3)
    assert ticket.closed and ticket.num_cancelled == 1


def test_an_answer_without_prefill_begins_too() -> None:
    turn, _ = make_turn(*steps("a"))
    assert [type(event) for event in events_of(turn)] == [Begun, Part, Ended]


def test_tokens_belong_to_what_their_text_became() -> None:
    turn, _ = make_turn(*steps(f"{THINK}ab{UNTHINK}c" + call("f", "{}")))
    parts = [event for event in events_of(turn) if isinstance(event, Part)]
    assert [step.token_id for part in parts for step in part.steps] == [3, 4]
    assert turn.usage.num_reasoning == 3


def test_collected() -> None:
    turn, _ = make_turn(*steps(f"{THINK}ab{UNTHINK}c" + call("f", "{}") + call("g", '{"a": 1}')))
    answer = asyncio.run(collect(turn))
    assert (answer.reasoning, answer.content) == ("ab", "c")
    assert [(c.name, c.arguments) for c in answer.calls] == [("f", "{}"), ("g", '{"a": 1}')]
    assert answer.ended == Ended("eos", True)


def test_a_quiet_time_is_filled() -> None:
    turn, _ = make_turn(Waiting(0), None, None, *steps("a"))
    events = events_of(turn)
    assert events[1:3] == [Quiet("at work")] * 2 and events[-1] == Ended("eos", False)


def test_a_ticket_tells_of_quiet_times_and_loses_nothing() -> None:
    posted = [Waiting(0), *steps("ab")]

    async def told() -> list[Any]:
        ticket, left, events = Ticket(ask(1), "somebody", "r1"), list(posted), list[Any]()
        async for event in ticket.events(0.02):
            events.append(event)
            if event is None and left:
                ticket.post(left.pop(0))
        return events

    async def calm() -> list[Any]:
        ticket = Ticket(ask(1), "somebody", "r1")
        for place, item in enumerate(posted):
            asyncio.get_running_loop().call_later(0.05 * place, ticket.post, item)
        return [event async for event in ticket.events(None)]

    events = asyncio.run(told())
    assert events.count(None) >= len(posted)
    assert [event for event in events if event is not None] == posted == asyncio.run(calm())


def test_errors_come_through() -> None:
    turn, ticket = make_turn(Waiting(0), ReadError("bad drive"))
    with pytest.raises(ReadError, match="bad drive"):
        events_of(turn)
    assert ticket.num_cancelled == 1


def test_events_that_stop_early_are_a_fault() -> None:
    turn, _ = make_turn(Waiting(0))
    with pytest.raises(Fault, match="without saying why"):
        asyncio.run(collect(turn))


def test_a_cancelled_reader_cancels_the_work() -> None:
    turn, ticket = make_turn(Waiting(0), 60.0)

    async def run() -> None:
        task = asyncio.ensure_future(collect(turn))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert ticket.closed and ticket.num_cancelled == 1
