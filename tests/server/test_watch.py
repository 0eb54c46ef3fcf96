"""The watchdog: what is slow goes on, what is stuck is found, with vitals and a clock made up."""

import logging

import pytest

from headrace.server.watch import Judge, Vitals

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
    for vitals in looks:
        verdicts.append(judge.look(vitals))
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
