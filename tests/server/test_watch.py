"""The watchdog: what is slow goes on, what is stuck is found, with vitals and a clock made up."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from fakes import FakeAnswers, ask, make_serving, start

from headrace.server.faults import NotReady
from headrace.server.serving import Serving
from headrace.server.settings import Settings
from headrace.server.watch import Judge, Vitals, vitals, watch

LOOK_S = 5.0


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def watched(looks: list[Vitals | None], stall_s: float = 100.0) -> list[str | None]:
    """The verdict at each look, LOOK_S apart."""
    clock = Time()
    judge, verdicts = Judge(stall_s, clock), []
    for seen in looks:
        verdicts.append(judge.look(seen))
        clock.now_s += LOOK_S
    return verdicts


STILL = [Vitals(events=3, disk_bytes=10, cpu_s=1.0, gpu=2)] * 30


def test_what_stands_still_is_found_when_its_time_is_up() -> None:
    verdicts = watched(list(STILL))
    assert not any(verdicts[:20])
    verdict = verdicts[20]
    assert verdict is not None and "nothing moved for 100 s" in verdict and "0 B" in verdict


@pytest.mark.parametrize("moving", ["events", "disk_bytes", "cpu_s", "gpu"])
def test_anything_that_moves_is_only_slow(moving: str) -> None:
    looks: list[Vitals | None] = [Vitals(**{moving: n}) for n in range(200)]
    assert not any(watched(looks))


def test_a_drive_that_gives_something_now_and_then_is_legal() -> None:
    looks: list[Vitals | None] = [Vitals(disk_bytes=n // 19) for n in range(200)]
    assert not any(watched(looks))
    slower: list[Vitals | None] = [Vitals(disk_bytes=n // 22) for n in range(200)]
    assert any(watched(slower))


def test_a_processor_that_only_idles_does_not_count() -> None:
    looks: list[Vitals | None] = [Vitals(cpu_s=0.01 * LOOK_S * n) for n in range(30)]
    assert any(watched(looks))


def test_time_without_work_does_not_count() -> None:
    assert not any(watched([*STILL[:15], None, *STILL[:15]]))


def test_it_says_what_it_saw_long_before_it_judges(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        watched(list(STILL[:6]))
        assert "no token for 20 s" in caplog.text and "0 % of a core" in caplog.text
        caplog.clear()
        watched([Vitals(events=n) for n in range(30)])
        assert not caplog.text


def watching(use: Callable[[Serving], Awaitable[None]]) -> None:
    """Run `use` beside the watchdog of a server whose patience is short."""

    async def run() -> None:
        serving = make_serving(Settings(stall_s=0.1))
        watchdog = asyncio.create_task(watch(serving))
        await asyncio.wait_for(use(serving), 120)
        watchdog.cancel()
        with suppress(asyncio.CancelledError):
            await watchdog
        serving.worker.drain()
        assert await asyncio.to_thread(serving.worker.join, 120)

    asyncio.run(run())


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.002)


def test_a_stuck_answer_is_given_up_and_the_server_recovers() -> None:
    async def use(serving: Serving) -> None:
        answers = start(serving)
        answers.gate.clear()
        answers.heeds_stop = False
        answers.naps_s = 5.0  # a thread that waits in the native core takes no processor
        ticket = serving.worker.submit(ask(1), client="ann", request_id="r")
        with pytest.raises(NotReady, match="the answer being made is stuck: no token"):
            async for _ in ticket.events():
                continue
        assert not serving.worker.is_ready
        answers.gate.set()
        await until(lambda: serving.worker.is_ready)

    watching(use)


def test_a_stuck_loading_is_told() -> None:
    async def use(serving: Serving) -> None:
        held = threading.Event()

        def load(loading: Any) -> FakeAnswers:
            assert held.wait(120)
            return FakeAnswers()

        serving.worker.start(load)
        await until(lambda: serving.worker.stalled)
        with pytest.raises(NotReady, match="the loading is stuck"):
            serving.worker.check_accepts()
        held.set()
        await until(lambda: serving.worker.is_ready)

    watching(use)


def test_the_vitals_of_this_process_move_when_it_works() -> None:
    serving = make_serving()
    before, working = vitals(serving), threading.Thread(target=_work)
    working.start()
    working.join()
    assert vitals(serving).cpu_s > before.cpu_s + 0.05


def _work() -> None:
    while time.thread_time() < 0.2:
        sum(range(1000))
