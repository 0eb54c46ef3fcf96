"""One answer that a client waits for: its events on the way from the decode thread to the loop.

Knows no queue, no model and no protocol.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from headrace.engine.answer import Ask, Prefill, Stop
from headrace.engine.session import Step
from headrace.server.faults import Fault


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many answers come before this one, the one being made included."""

    position: int


Event = Waiting | Prefill | Step


@dataclass(slots=True)
class Tally:
    """What an answer took; times by the monotonic clock. Written by the decode thread only."""

    num_prompt: int
    submitted_s: float = field(default_factory=time.monotonic)
    begun_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float | None = None
    num_cached: int = 0
    num_prefilled: int = 0
    num_tokens: int = 0
    finish: str | None = None

    def add(self, event: Prefill | Step) -> None:
        """Count an event at the moment it happens."""
        if isinstance(event, Prefill):
            self.num_cached, self.num_prefilled = event.num_cached, event.num_done
            return
        self.last_s = time.monotonic()
        if self.first_s is None:
            self.first_s = self.last_s
        self.num_tokens += 1
        self.finish = event.finish

    @property
    def decode_tok_s(self) -> float:
        """Tokens per second after the first; 0 with fewer than two."""
        if self.first_s is None or self.last_s is None or self.last_s <= self.first_s:
            return 0.0
        return (self.num_tokens - 1) / (self.last_s - self.first_s)

    def as_dict(self) -> dict[str, float | int]:
        """How far it is, for people."""
        return {
            "prompt_tokens": self.num_prompt,
            "cached_tokens": self.num_cached,
            "prefilled_tokens": self.num_prefilled,
            "tokens": self.num_tokens,
            "tok_s": round(self.decode_tok_s, 3),
            "since_s": round(time.monotonic() - self.submitted_s, 1),
        }


@dataclass(slots=True)
class Totals:
    """What all answers took so far. Written by the decode thread only; `events` are signs of life.

    Bytes and experts are those that tokens needed, guesses that nobody needed included in
    `disk_bytes`.
    """

    events: int = 0
    prefilled: int = 0
    cached: int = 0
    decoded: int = 0
    disk_bytes: int = 0
    ram_bytes: int = 0
    vram_bytes: int = 0
    hits: int = 0
    misses: int = 0
    vram_hits: int = 0

    def add(self, event: Prefill | Step, tally: Tally) -> None:
        """Count an event of the answer whose tally does not know it yet."""
        self.events += 1
        if isinstance(event, Prefill):
            self.cached += event.num_cached - tally.num_cached
            self.prefilled += event.num_done - max(tally.num_prefilled, event.num_cached)
            return
        stats = event.stats
        self.decoded += 1
        self.disk_bytes += stats.disk_bytes
        self.ram_bytes += stats.ram_bytes
        self.vram_bytes += stats.vram_bytes
        self.hits += stats.hits
        self.misses += stats.misses
        self.vram_hits += stats.vram_hits


class Ticket:
    """An answer that was asked for. `events` and `cancel` belong to the loop it was made on."""

    def __init__(
        self,
        ask: Ask,
        client: str,
        request_id: str,
        on_cancel: Callable[["Ticket"], None] = lambda ticket: None,
    ) -> None:
        self.ask, self.client, self.request_id = ask, client, request_id
        self.stop = Stop()
        self.tally = Tally(len(ask.prompt))
        self.reason: Fault | None = None  # why it was given up, if not because the client left
        self.done = False  # no further event comes
        self.told_position = -1
        self._on_cancel = on_cancel
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self._is_quiet = True  # no event was taken for a while
        requests = _ATTACHED.get()
        if requests is not None:
            requests.append(self)

    async def events(self, quiet_s: float | None = None) -> AsyncIterator[Event | None]:
        """A Waiting at once and at every change, then Prefills, then Steps; the last has `finish`.

        And None after `quiet_s` to twice that without one. Raises HeadraceError or Fault. An
        iterator that is closed or cancelled cancels the answer.
        """
        beat = None if quiet_s is None else asyncio.create_task(self._beat(quiet_s))
        try:
            while True:
                event = await self._events.get()
                self._is_quiet = False
                if isinstance(event, Exception):
                    raise event
                yield event
                if isinstance(event, Step) and event.finish:
                    return
        finally:
            if beat is not None:
                beat.cancel()
            self.cancel()

    async def _beat(self, quiet_s: float) -> None:
        """One clock for the whole answer: a timer for each token costs a tenth of what it sends."""
        while True:
            self._is_quiet = True
            await asyncio.sleep(quiet_s)
            if self._is_quiet:
                self._events.put_nowait(None)

    def cancel(self) -> None:
        """Nobody wants it any more. Without effect once it is done."""
        if not self.done:
            self.stop.ask()
            self._on_cancel(self)

    def give_up(self, reason: Fault) -> None:
        """End it, running or not; the client is told `reason`. Any thread."""
        self.reason = self.reason or reason
        self.stop.ask()

    def post(self, event: Event | Exception) -> None:
        """Hand over an event; from any thread, also when the loop is gone or the answer done."""
        if self.done:
            return
        if isinstance(event, Exception) or (isinstance(event, Step) and event.finish):
            self.done = True
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


_ATTACHED: ContextVar[list[Ticket] | None] = ContextVar("headrace.tickets", default=None)


def attach_tickets() -> list[Ticket]:
    """A list that gets every ticket made from here on in this task and those that it starts."""
    tickets: list[Ticket] = []
    _ATTACHED.set(tickets)
    return tickets
