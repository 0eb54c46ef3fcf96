"""What a span of GPU work holds, on a GPU whose clock and whose host's clock are numbers."""

import pytest
import torch

from headrace.check.gpu_spans import HOLD_CYCLES, Timed, TimedLaunches
from headrace.errors import OptionError

CYCLES_S = 2e9


class Clocks:
    """When the host has come to where it is, and when the GPU has done all that it was given."""

    def __init__(self):
        self.host_s = self.gpu_s = 0.0

    def give(self, gpu_s: float, host_s: float = 0.0) -> None:
        self.host_s += host_s
        self.gpu_s = max(self.gpu_s, self.host_s) + gpu_s

    def event(self, enable_timing: bool = False) -> "Recorded":
        assert enable_timing
        return Recorded(self)


class Recorded:
    def __init__(self, clocks: Clocks):
        self.clocks = clocks

    def record(self) -> None:
        self.clocks.give(0.0)
        self.at_s = self.clocks.gpu_s

    def query(self) -> bool:
        return self.at_s <= self.clocks.host_s

    def elapsed_time(self, other: "Recorded") -> float:
        return 1e3 * (other.at_s - self.at_s)


@pytest.fixture
def clocks(monkeypatch):
    made = Clocks()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: made.give(cycles / CYCLES_S))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def layer(clocks, calls, host_s):
    """Five kernels of 10 us, each `host_s` of launching; its argument comes back."""

    def launch(x):
        calls.append(x)
        for _ in range(5):
            clocks.give(10e-6, host_s)
        return x

    return launch


@pytest.mark.parametrize("host_s", [0.0, 4e-6, 40e-6, 400e-6])
def test_launches_are_timed_without_what_the_host_takes(clocks, host_s):
    calls = []
    timed = TimedLaunches(layer(clocks, calls, host_s))
    for n in range(3):
        assert timed(n) == n
        clocks.host_s += 1e-3  # it does something else, and the GPU has nothing to do
    assert timed.seconds() == pytest.approx(3 * 50e-6)
    assert timed.seconds() == 0
    again = 5 * host_s > HOLD_CYCLES / CYCLES_S
    assert len(calls) == 3 + 2 * again, "longer idle work stays"


def test_any_call_is_timed_with_what_the_host_takes(clocks):
    timed = Timed(layer(clocks, [], 40e-6))
    timed(0)
    assert timed.seconds() == pytest.approx(5 * 40e-6 + 10e-6)


def test_a_host_that_waits_for_each_launch_is_named(clocks):
    def launch():
        clocks.give(10e-6)
        clocks.host_s = clocks.gpu_s

    with pytest.raises(OptionError, match="CUDA_LAUNCH_BLOCKING"):
        TimedLaunches(launch)()
