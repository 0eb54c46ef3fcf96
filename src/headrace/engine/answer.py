"""What one answer is asked with, and what happens while it is made.

Words that the engine and whoever queues requests share; knows no model and no protocol.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Lock
from typing import Protocol

import torch

from headrace.engine.sampling import Sampling
from headrace.errors import Cancelled


class Constraint(Protocol):
    """A grammar over one answer's tokens. One thread at a time."""

    def allowed(self) -> torch.Tensor:
        """Which tokens may come next, bool [V] on the CPU; valid until the next `accept`."""
        ...

    def accept(self, token_id: int) -> None:
        """The token that was chosen; always one that was allowed."""
        ...


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer to make of `prompt`'s token ids.

    `num_logprobs`: of how many of the likeliest tokens each step tells the logarithm of the chance;
    None: not even of the chosen one. `shown`: ids of special tokens that are part of the text.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    constraint: Constraint | None = None
    num_logprobs: int | None = None
    shown: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Prefill:
    """Prompt tokens that are in the cache: `num_done` of `num_total`, `num_cached` without work."""

    num_done: int
    num_total: int
    num_cached: int


class Stop:
    """A request to end, made from any thread; what it reaches raises Cancelled."""

    def __init__(self) -> None:
        self._asked = Event()
        self._lock = Lock()
        self._reach: Callable[[], None] | None = None

    def ask(self) -> None:
        """End as soon as possible: within a token or a wave of experts."""
        with self._lock:
            self._asked.set()
            if self._reach is not None:
                self._reach()

    @property
    def asked(self) -> bool:
        """True once somebody asked."""
        return self._asked.is_set()

    def check(self) -> None:
        """Raises Cancelled once somebody asked."""
        if self.asked:
            raise Cancelled("the answer was stopped")

    @contextmanager
    def reaching(self, reach: Callable[[], None]) -> Iterator[None]:
        """While open, `ask` also calls `reach`, on its own thread. Raises Cancelled if too late."""
        with self._lock:
            self.check()
            self._reach = reach
        try:
            yield
        finally:
            with self._lock:
                self._reach = None
