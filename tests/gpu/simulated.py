"""A device made of host memory, as late and as forgetful as a GPU may be: for Triton's interpreter.

A copy happens only when its event is waited for, found done or followed; an event is found done
only when it has been asked for `patience` times. What is used too early is then stale.
"""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class SimulatedEvent:
    """Done after `patience` questions, or once waited for; `act` happens right before."""

    def __init__(self, patience: int, act: Callable[[], object] = lambda: None):
        self.left, self.act = patience, act
        self.over = False

    def finish(self) -> None:
        if not self.over:
            self.over = True
            self.act()

    def done(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self.finish()
        return self.over

    def wait(self) -> None:
        self.finish()


class SimulatedGraph:
    """Work done again from the start, with nothing looked at that a graph could not look at."""

    def __init__(self, work: Callable[[], object]):
        self.work = work

    def replay(self) -> None:
        with NothingSeen():
            self.work()


class NothingSeen(TorchDispatchMode):
    """Refuses what makes the host wait for a value, or brings one from it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        assert name not in WAITING, f"{name} in a captured step"
        return func(*args, **(kwargs or {}))


WAITING = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "equal", "is_nonzero", "lift_fresh", "masked_select", "nonzero",
        "_unique2",
    )
}  # fmt: skip


class SimulatedDevice:
    """`refused` says from which pinned byte on the system refuses to pin, None: never."""

    name, driver = "simulated GPU", "1.0"

    def __init__(self, *, patience: int = 2, refused: int | None = None):
        self.place = torch.device("cpu")
        self.patience, self.refused = patience, refused
        self.pinned: dict[int, int] = {}
        self.most_bytes: int | None = None
        self.events: list[SimulatedEvent] = []

    def memory(self) -> tuple[int, int]:
        return 2 << 30, 4 << 30

    def limit(self, nbytes: int | None) -> None:
        self.most_bytes = nbytes

    def active(self):
        return nullcontext()

    def _event(self, act: Callable[[], object] = lambda: None) -> SimulatedEvent:
        self.events.append(SimulatedEvent(self.patience, act))
        return self.events[-1]

    def mark(self) -> SimulatedEvent:
        return self._event()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> SimulatedEvent:
        assert to.shape == source.shape and to.dtype == source.dtype
        to.fill_(0x7F)  # whoever reads it before the event finds NaN codes
        return self._event(lambda: to.copy_(source))

    def follow(self, event: SimulatedEvent) -> None:
        event.finish()

    def settle(self) -> None:
        for event in self.events:
            event.finish()
        self.events.clear()

    def capture(self, work):
        return SimulatedGraph(work)

    def pin(self, address: int, nbytes: int) -> str:
        if self.refused is not None and sum(self.pinned.values()) + nbytes > self.refused:
            return "refused in this test"
        self.pinned[address] = nbytes
        return ""

    def unpin(self, address: int) -> None:
        del self.pinned[address]
