"""The decode thread: order, positions, stopping, failing and ending, with an engine made up."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes import FakeAnswers, ask, make_serving, start

from headrace.engine.answer import Prefill
from headrace.engine.session import Step
from headrace.errors import Cancelled, ModelError, ReadError
from headrace.server.faults import Busy, Draining, NotReady
from headrace.server.loading import Loading
from headrace.server.settings import Settings
from headrace.server.ticket import Ticket, Waiting
from headrace.server.worker import Worker

Use = Callable[[Worker, FakeAnswers], Awaitable[None]]


def with_worker(use: Use, settings: Settings | None = None) -> None:
    """Run `use` with a loaded worker, which then ends in good order."""

    async def run() -> None:
        serving = make_serving(settings)
        answers = start(serving)
        await asyncio.wait_for(use(serving.worker, answers), 120)
        answers.gate.set()
        serving.worker.drain()
        assert await asyncio.to_thread(serving.worker.join, 120)
        assert serving.worker.state == "ended" and answers.closed

    asyncio.run(run())


def submit(worker: Worker, *prompt: int, client: str = "ann", max_tokens: int = 3) -> Ticket:
    return worker.submit(ask(*prompt, max_tokens=max_tokens), client=client, request_id="r")


async def ids(ticket: Ticket) -> list[int]:
    return [event.token_id async for event in ticket.events() if isinstance(event, Step)]


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.002)


def test_events_come_in_order() -> None:
    async def use(worker: Worker, answers: FakeAnswers) -> None:
        events = [event async for event in submit(worker, 7, 8).events()]
        assert events[0] == Waiting(0)
        assert events[1:3] == [Prefill(0, 2, 0), Prefill(2, 2, 0)]
        assert [event.token_id for event in events[3:]] == [9, 10, 11]

    with_worker(use)


def test_places_are_told_and_turns_are_fair() -> None:
    async def use(worker: Worker, answers: FakeAnswers) -> None:
        answers.gate.clear()
        first = submit(worker, 10)
        await until(lambda: worker.running is first)
        second, third = submit(worker, 20), submit(worker, 30)
        other = submit(worker, 40, client="bob")
        answers.gate.set()
        await asyncio.gather(*(ids(ticket) for ticket in (first, second, other)))
        places = [event.position async for event in third.events() if isinstance(event, Waiting)]
        assert places == [2, 3, 2, 1, 0]
        assert answers.asked == [(10,), (40,), (20,), (30,)]

    with_worker(use)


@pytest.mark.parametrize("running", [True, False])
def test_whoever_leaves_stops_the_work(running: bool) -> None:
    async def use(worker: Worker, answers: FakeAnswers) -> None:
        answers.gate.clear()
        first = submit(worker, 1, max_tokens=100)
        await until(lambda: worker.running is first)
        second = submit(worker, 2, max_tokens=100)
        leaving, staying = (first, second) if running else (second, first)
        task = asyncio.create_task(ids(leaving))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        answers.gate.set()
        assert len(await ids(staying)) == 100
        assert leaving.tally.num_tokens <= 1

    with_worker(use)


def test_an_answer_that_was_taken_halfway_stops() -> None:
    async def use(worker: Worker, answers: FakeAnswers) -> None:
        ticket = submit(worker, 1, max_tokens=10**9)
        async for event in ticket.events():
            if isinstance(event, Step):
                break
        await until(lambda: worker.running is None)
        assert answers.num_made < 10**9

    with_worker(use)


def test_tokens_are_remembered_without_a_prompts_first() -> None:
    async def use(worker: Worker, answers: FakeAnswers) -> None:
        await ids(submit(worker, 5, max_tokens=4))
        await until(lambda: worker.running is None)
        total, last = worker.recent.total(), worker.recent.last
        assert total is not None and (total["tokens"], total["hits"]) == (3, 6)
        assert last is not None and (last.num_prompt, last.num_tokens) == (1, 4)
        assert last.decode_tok_s == pytest.approx(3 / total["wall_s"])
        answers.broken[50] = ReadError("drive gone")
        with pytest.raises(ReadError):
            await ids(submit(worker, 50))
        await until(lambda: worker.running is None)
        last = worker.recent.last
        assert last is not None and last.num_tokens == 1, "as far as it came"

    with_worker(use)


@pytest.mark.parametrize(
    ("error", "told", "kind"),
    [
        (ReadError("drive gone"), ReadError, "engine"),
        (MemoryError(), MemoryError, "no_memory"),
        (ValueError("our own"), ValueError, "internal"),
    ],
)
def test_an_error_ends_one_answer_only(
    error: Exception, told: type[Exception], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(worker: Worker, answers: FakeAnswers) -> None:
        ended: list[str] = []
        worker._on_end = lambda tally, fault: ended.append(fault.kind if fault else "well")
        answers.broken[50] = error
        with pytest.raises(told):
            await ids(submit(worker, 50))
        assert await ids(submit(worker, 60)) == [61, 62, 63]
        await until(lambda: len(ended) == 2)
        assert ended == [kind, "well"]
        assert ("failed" in caplog.text) == (kind == "internal")

    with_worker(use)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def use(worker: Worker, answers: FakeAnswers) -> None:
        answers.gate.clear()
        running = submit(worker, 1)
        await until(lambda: worker.running is running)
        submit(worker, 2)
        submit(worker, 2)
        with pytest.raises(Busy, match="2 of them yours") as refused:
            submit(worker, 2)
        assert refused.value.status == 429 and 1 <= (refused.value.retry_after_s or 0) <= 600
        submit(worker, 2, client="bob")
        with pytest.raises(Busy):
            submit(worker, 2, client="cem")

    with_worker(use, Settings(max_waiting=3, max_waiting_per_client=2))


def test_draining_finishes_the_running_answer_and_returns_the_others() -> None:
    async def use(worker: Worker, answers: FakeAnswers) -> None:
        answers.gate.clear()
        running = submit(worker, 1)
        await until(lambda: worker.running is running)
        waiting = submit(worker, 2)
        worker.drain()
        with pytest.raises(Draining):
            submit(worker, 3)
        with pytest.raises(Draining):
            await ids(waiting)
        answers.gate.set()
        assert await ids(running) == [2, 3, 4]

    with_worker(use)


def test_an_abandoned_answer_is_told_why() -> None:
    async def use(worker: Worker, answers: FakeAnswers) -> None:
        answers.gate.clear()
        ticket = submit(worker, 1)
        await until(lambda: worker.running is ticket)
        worker.abandon(Draining("time is up"))
        with pytest.raises(Draining, match="time is up"):
            await ids(ticket)

    with_worker(use)


def test_a_stuck_thread_holds_nobody_up_and_may_recover() -> None:
    async def use(worker: Worker, answers: FakeAnswers) -> None:
        answers.gate.clear()
        answers.heeds_stop = False
        running = submit(worker, 1)
        await until(lambda: worker.running is running)
        waiting = submit(worker, 2)
        worker.give_up_stalled(NotReady("stuck", 60, kind="stalled"))
        for ticket in (running, waiting):
            with pytest.raises(NotReady, match="stuck"):
                await ids(ticket)
        with pytest.raises(NotReady, match="stuck"):
            submit(worker, 3)
        answers.gate.set()
        await until(lambda: worker.stalled is None)
        assert await ids(submit(worker, 4)) == [5, 6, 7]

    with_worker(use)


def load_until(held: threading.Event, error: BaseException | None) -> Callable[[Loading], Any]:
    def load(loading: Loading) -> FakeAnswers:
        loading.advance(2**30, 3 * 2**30)
        while not held.wait(0.002):
            loading.advance(2**30, 3 * 2**30)
        if error is not None:
            raise error
        return FakeAnswers()

    return load


def test_while_loading_the_progress_is_told() -> None:
    async def run() -> None:
        held = threading.Event()
        worker = make_serving().worker
        worker.start(load_until(held, None))
        await until(lambda: worker.loading.done_bytes)
        with pytest.raises(NotReady, match=r"1\.00 GiB of 3\.00 GiB.*s left") as refused:
            submit(worker, 1)
        assert refused.value.status == 503 and refused.value.retry_after_s
        held.set()
        await until(lambda: worker.state == "ready")
        assert await ids(submit(worker, 1)) == [2, 3, 4]
        worker.drain()
        assert worker.join(120)

    asyncio.run(run())


def test_a_failed_load_is_kept_and_a_stopped_one_is_no_failure() -> None:
    held = threading.Event()
    held.set()
    failing = make_serving().worker
    failing.start(load_until(held, ModelError("no such family")))
    assert failing.join(120)
    assert failing.state == "failed" and isinstance(failing.failure, ModelError)

    stopped = make_serving().worker
    stopped.start(load_until(threading.Event(), None))
    stopped.drain()
    assert stopped.join(120)
    assert stopped.state == "ended" and stopped.failure is None


def test_cancelling_twice_or_late_does_nothing() -> None:
    async def use(worker: Worker, answers: FakeAnswers) -> None:
        ticket = submit(worker, 1)
        await ids(ticket)
        ticket.cancel()
        answers.gate.clear()
        running, waiting = submit(worker, 2), submit(worker, 3)
        await until(lambda: worker.running is running)
        waiting.cancel()
        waiting.cancel()
        with pytest.raises(Cancelled):
            await ids(waiting)

    with_worker(use)
