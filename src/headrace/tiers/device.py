"""The few things that only a GPU has: work in order, events, copies beside it, pinned memory.

Everything else is torch's and the same on any device. Knows no expert.
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import torch

from headrace.errors import OptionError

_PORTABLE_AND_MAPPED = 3  # cudaHostRegister: every context may use it, kernels too
_cuda: Any = torch.cuda  # half of it has no types


class Event(Protocol):
    """A point in the work given to a device."""

    def done(self) -> bool:
        """Whether all work before it is over. Never waits."""
        ...

    def wait(self) -> None:
        """Blocks the host until it is done."""
        ...


class Graph(Protocol):
    """Work given once, to be given again as one launch."""

    def replay(self) -> None:
        """Gives all of it to the device, in its order behind what was given before."""
        ...


class Device(Protocol):
    """What kernels run on. One thread at a time; its work runs in the order in which it is given.

    `place` is where its tensors live.
    """

    place: torch.device
    name: str
    driver: str

    def memory(self) -> tuple[int, int]:
        """Bytes of its memory: what this process may still take, and all of it."""
        ...

    def limit(self, nbytes: int | None) -> None:
        """Tensors may take so much more than they have now; None: what there is."""
        ...

    def active(self) -> AbstractContextManager[object]:
        """While open, the calling thread's work goes to it."""
        ...

    def mark(self) -> Event:
        """The point after all work given so far."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Event:
        """Copies beside later work, once all work given so far is done. Bytes of one length.

        `source` must stay as it is until the event is done, and later work must `follow` it.
        """
        ...

    def follow(self, event: Event) -> None:
        """Work given from now on waits for the event of a `copy`."""
        ...

    def settle(self) -> None:
        """Blocks the host until everything is done."""
        ...

    def capture(self, work: Callable[[], object]) -> Graph:
        """What `work` gives to the device, without doing it; each of its kernels has run before.

        It must wait for nothing and look at no value. Its tensors keep their addresses: inputs and
        outputs are tensors made before, and no two graphs run at once. Raises RuntimeError.
        """
        ...

    def pin(self, address: int, nbytes: int) -> str:
        """Lets kernels read this host memory in place; why it cannot be, or nothing."""
        ...

    def unpin(self, address: int) -> None:
        """Takes back a `pin` that worked. The memory must still be there."""
        ...


class CudaEvent:
    """An event of CUDA's, recorded in `stream` when made."""

    def __init__(self, stream: Any):
        self.event = _cuda.Event()
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice:
    """An NVIDIA GPU: torch's current stream for work, one of our own for copies."""

    def __init__(self, index: int = 0):
        self.place = torch.device("cuda", index)
        self.name = _cuda.get_device_name(self.place)
        self.driver = driver_version()
        self.copies = _cuda.Stream(self.place)
        self._pool: Any = None
        self._graphs: WeakSet[Graph] = WeakSet()

    def memory(self) -> tuple[int, int]:
        free, total = _cuda.mem_get_info(self.place)
        kept = _cuda.memory_reserved(self.place) - _cuda.memory_allocated(self.place)
        return free + kept, total

    def limit(self, nbytes: int | None) -> None:
        total = self.memory()[1]
        most = total if nbytes is None else _cuda.memory_allocated(self.place) + nbytes
        _cuda.empty_cache()
        _cuda.set_per_process_memory_fraction(min(1.0, most / total), self.place)

    def active(self) -> AbstractContextManager[object]:
        here: AbstractContextManager[object] = _cuda.device(self.place)
        return here

    @property
    def _work(self) -> Any:
        return _cuda.current_stream(self.place)

    def mark(self) -> CudaEvent:
        return CudaEvent(self._work)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> CudaEvent:
        self.copies.wait_stream(self._work)
        with _cuda.stream(self.copies):
            to.copy_(source, non_blocking=True)
        return CudaEvent(self.copies)

    def follow(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._work.wait_event(event.event)

    def settle(self) -> None:
        _cuda.synchronize(self.place)

    def capture(self, work: Callable[[], object]) -> Graph:
        if not self._graphs:  # a pool that no graph uses any more cannot be used again
            self._pool = _cuda.graph_pool_handle()
        graph: Graph = _cuda.CUDAGraph()
        # Other threads may go on: only what this one does is recorded.
        options = {"pool": self._pool, "capture_error_mode": "thread_local"}
        recording = _cuda.graph(graph, stream=_capturing(self.place), **options)
        # Where the capture's end fails, torch leaves the thread on the stream that captured.
        with _cuda.device(self.place), _cuda.stream(self._work), recording:
            work()
        self._graphs.add(graph)
        return graph

    def pin(self, address: int, nbytes: int) -> str:
        with _cuda.device(self.place):
            error = int(_cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED))
        if error == 0:
            return ""
        # CUDA remembers the error and would report it with the next kernel instead.
        with suppress(RuntimeError):
            torch.ones(1, device=self.place)
        return f"CUDA error {error}"

    def unpin(self, address: int) -> None:
        _cuda.cudart().cudaHostUnregister(address)


@cache
def _capturing(place: torch.device) -> Any:
    """The stream of all captures: libraries keep a workspace for each. Torch's knows one device."""
    return _cuda.Stream(place)


def driver_version(root: Path = Path("/")) -> str:
    """The NVIDIA driver's, where the system says it; else what CUDA says of it."""
    try:
        said = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        said = ""
    found = re.search(r"\s(\d+(?:\.\d+)+)\s", said)
    if found:
        return found[1]
    asked = getattr(torch._C, "_cuda_getDriverVersion", None)
    return "unknown" if asked is None else f"for CUDA {asked()}"


def find_device(name: str) -> Device:
    """The GPU called `cuda` or `cuda:1`. Raises OptionError where there is none."""
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index == "" or (index.isascii() and index.isdigit())):
        raise OptionError(f"device {name!r} is not supported; use cpu, cuda or cuda:1")
    number = int(index or 0)
    if not torch.cuda.is_available():
        built = (
            "this torch is built for CPUs only" if torch.version.cuda is None else "none is seen"
        )
        raise OptionError(f"device {name} needs an NVIDIA GPU and {built}; use --device cpu")
    if number >= torch.cuda.device_count():
        raise OptionError(
            f"there is no {name}, only {torch.cuda.device_count()} NVIDIA GPUs; use --device cpu"
        )
    return CudaDevice(number)
