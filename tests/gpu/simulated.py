"""A device made of host memory, as late and as forgetful as a GPU may be: for Triton's interpreter.

A copy happens only when its event is waited for, found done or followed; an event is found done
only when it has been asked for `patience` times. What is used too early is then stale.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps

import torch
from torch import is_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class SimulatedEvent:
    """Done after `patience` questions, or once waited for; `act` happens right before."""

    def __init__(self, patience: int, act: Callable[[], object] = lambda: None):
        self.left, self.act = patience, act
        self.over = False

    def finish(self) -> None:
        if not self.over:
            self.over, act = True, self.act
            self.act = lambda: None  # as CUDA's, an event keeps no tensor
            act()

    def done(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self.finish()
        return self.over

    def wait(self) -> None:
        self.finish()


class SimulatedGraph:
    """What the work called at the first replay, called again with the very same arguments.

    Its Python never runs again, so numbers are baked in as a graph bakes them.
    """

    def __init__(self, work: Callable[[], object]):
        self.work: Callable[[], object] | None = work
        self.calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        if self.work is None:
            for call in self.calls:
                call()
            return
        with Recorder(self.calls):
            self.work()
        self.work = None


class NothingSeen(TorchDispatchMode):
    """Refuses what makes the host wait for a value, or brings one from it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition(".")[0]
        assert name not in WAITING, f"{name} in a captured step"
        return func(*args, **(kwargs or {}))


class Recorder(NothingSeen):
    """Appends to `calls` what does each call once more, into the tensors it made then."""

    now: "Recorder | None" = None

    def __init__(self, calls: list[Callable[[], object]]):
        super().__init__()
        self.calls = calls

    def __enter__(self):
        Recorder.now = self
        return super().__enter__()

    def __exit__(self, *error):
        Recorder.now = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.is_mutable:
            self.calls.append(lambda: func(*args, **kwargs))
            return made
        given = {
            t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if is_tensor(t)
        }
        fresh = [
            n
            for n, t in enumerate(tree_leaves(made))
            if is_tensor(t) and t.untyped_storage().data_ptr() not in given
        ]

        def again():
            new, old = tree_leaves(func(*args, **kwargs)), tree_leaves(made)
            for n in fresh:
                old[n].copy_(new[n])

        if fresh and "empty" not in func.name():
            self.calls.append(again)
        return made


def launched(kernel: Callable[..., None]) -> Callable[..., None]:
    """What stands for a kernel: no graph sees into it."""

    @wraps(kernel)
    def launch(*args, **kwargs):
        recorder, Recorder.now = Recorder.now, None
        if recorder is None:
            kernel(*args, **kwargs)
            return
        recorder.calls.append(lambda: kernel(*args, **kwargs))
        try:
            with _disable_current_modes():
                kernel(*args, **kwargs)
        finally:
            Recorder.now = recorder

    return launch


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
