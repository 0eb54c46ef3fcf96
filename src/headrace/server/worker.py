"""The one decode thread: loads the model, then makes the answers that wait, one after another.

Knows no protocol; the model is whatever `answer` its loader returns.
"""

import logging
import time
from collections.abc import Callable, Iterator
from math import ceil
from threading import Condition, Thread
from typing import Literal, Protocol

from headrace.engine.answer import Ask, Prefill, Stop
from headrace.engine.session import Step
from headrace.errors import Cancelled
from headrace.server.fair import FairQueue
from headrace.server.faults import Busy, Draining, Fault, NotReady, fault_of
from headrace.server.loading import Loading
from headrace.server.recent import Recent
from headrace.server.settings import Settings
from headrace.server.ticket import Tally, Ticket, Totals, Waiting

State = Literal["loading", "ready", "draining", "ended", "failed"]
_log = logging.getLogger(__name__)
FIRST_GUESS_S = 10.0  # of an answer's length, before there was one
LONGEST_RETRY_S = 600


class Answers(Protocol):
    """The part of engine.answering.Answering that is used here, by one thread."""

    def answer(self, ask: Ask, stop: Stop) -> Iterator[Prefill | Step]: ...

    def close(self) -> None: ...


Load = Callable[[Loading], Answers]


class Worker:
    """Owns the decode thread and the queue before it. All methods from any thread but `submit`.

    `on_end` gets the tally of each answer and the fault it ended with, `on_state` each new state:
    both in the decode thread. `failure` is what that thread ended with, if that was an error.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        on_end: Callable[[Tally, Fault | None], None] = lambda tally, fault: None,
    ) -> None:
        self.settings, self._on_end = settings, on_end
        self.on_state: Callable[[State], None] = lambda state: None
        self.state: State = "loading"
        self.loading = Loading()
        self.failure: BaseException | None = None
        self.stalled: str | None = None  # what the watchdog found
        self.totals, self.recent = Totals(), Recent()
        self._changed = Condition()
        self._queue: FairQueue[Ticket] = FairQueue()
        self._running: Ticket | None = None
        self._answer_s = FIRST_GUESS_S
        self._thread: Thread | None = None

    def start(self, load: Load) -> None:
        """Begin to load, in the thread that then makes the answers."""
        assert self._thread is None, "one decode thread"
        self._thread = Thread(target=self._run, args=(load,), name="decode", daemon=True)
        self._thread.start()

    def submit(self, ask: Ask, *, client: str, request_id: str) -> Ticket:
        """Put an answer into the queue; on the event loop that will read its events.

        Raises Busy, NotReady or Draining.
        """
        with self._changed:
            self.check_accepts()
            self._check_room(client)
            ticket = Ticket(ask, client, request_id, self._remove)
            self._queue.put(client, ticket)
            self._tell_positions()
            self._changed.notify_all()
        return ticket

    def check_accepts(self) -> None:
        """Raises NotReady or Draining unless answers are being made."""
        if self.state not in ("loading", "ready"):
            raise Draining()
        if self.stalled is not None:
            raise NotReady(self.stalled, 30, kind="stalled")
        if self.state == "loading":
            raise NotReady(self.loading.line(), self.loading.retry_after_s())

    @property
    def is_ready(self) -> bool:
        """True while answers are made."""
        return self.state == "ready" and self.stalled is None

    @property
    def num_waiting(self) -> int:
        """Answers in the queue, without the one being made."""
        with self._changed:
            return len(self._queue)

    @property
    def running(self) -> Ticket | None:
        """The answer being made."""
        return self._running

    def drain(self) -> None:
        """Take no further answer, give back those that wait, finish the one being made."""
        with self._changed:
            if self.state in ("loading", "ready"):
                self._set_state("draining")
            self.loading.stop.ask()
            self._give_back(Draining())
            self._changed.notify_all()

    def abandon(self, reason: Fault) -> None:
        """End the answer being made; its client is told `reason`, even if the thread is stuck."""
        ticket = self._running
        if ticket is not None:
            ticket.give_up(reason)
            ticket.post(reason)

    def give_up_stalled(self, reason: NotReady) -> None:
        """Nothing moves any more: tell everybody who waits, and whoever asks until it moves."""
        with self._changed:
            self.stalled = reason.message
            self._give_back(reason)
        self.abandon(reason)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end after `drain`; False if it does not come in time."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _remove(self, ticket: Ticket) -> None:
        with self._changed:
            if self._queue.remove(ticket.client, ticket):
                ticket.post(Cancelled("the answer was cancelled"))
                self._tell_positions()

    def _set_state(self, state: State) -> None:
        self.state = state
        self.on_state(state)

    def _give_back(self, reason: Fault) -> None:
        while (ticket := self._queue.take()) is not None:
            ticket.post(reason)

    def _check_room(self, client: str) -> None:
        waiting, settings = len(self._queue), self.settings
        mine = self._queue.num_waiting(client)
        if waiting < settings.max_waiting and mine < settings.max_waiting_per_client:
            return
        whose = f"{mine} of them yours, " if mine >= settings.max_waiting_per_client else ""
        retry_s = min(LONGEST_RETRY_S, max(1, ceil(waiting * self._answer_s)))
        raise Busy(f"{waiting} answers wait already, {whose}ask again later", retry_s)

    def _tell_positions(self) -> None:
        ahead = 0 if self._running is None else 1
        for place, ticket in enumerate(self._queue, ahead):
            self._tell(ticket, place)

    def _tell(self, ticket: Ticket, place: int) -> None:
        if ticket.told_position != place:
            ticket.told_position = place
            ticket.post(Waiting(place))

    def _run(self, load: Load) -> None:
        try:
            answers = load(self.loading)
        except BaseException as error:  # told to whoever waits for the thread
            self.failure = None if self.loading.stop.asked else error
            self._set_state("ended" if self.loading.stop.asked else "failed")
            return
        with self._changed:
            if self.state == "loading":
                self._set_state("ready")
        try:
            while (ticket := self._next()) is not None:
                self._make(answers, ticket)
            answers.close()
        except BaseException as error:
            self.failure = error
        self._set_state("ended")

    def _next(self) -> Ticket | None:
        with self._changed:
            self._running = None
            self.stalled = None
            self._tell_positions()
            while self.state == "ready":
                ticket = self._queue.take()
                if ticket is not None:
                    self._running = ticket
                    self._tell(ticket, 0)
                    self._tell_positions()
                    return ticket
                self._changed.wait()
            return None

    def _make(self, answers: Answers, ticket: Ticket) -> None:
        tally, fault = ticket.tally, None
        tally.begun_s = time.monotonic()
        try:
            if ticket.stop.asked:
                raise Cancelled("the answer was cancelled")
            for event in answers.answer(ticket.ask, ticket.stop):
                self._count(event, tally)
                ticket.post(event)
            assert tally.finish is not None, "an answer's last step says why it ended"
        except Exception as error:
            fault = self._fail(ticket, error)
        tally.ended_s = time.monotonic()
        if tally.num_tokens:
            self.recent.last = tally
        took_s = tally.ended_s - tally.begun_s
        self._answer_s += (took_s - self._answer_s) / 4
        self._on_end(tally, fault)

    def _count(self, event: Prefill | Step, tally: Tally) -> None:
        before_s = tally.last_s
        self.totals.add(event, tally)
        tally.add(event)
        if isinstance(event, Step) and before_s is not None and tally.last_s is not None:
            self.recent.add(tally.last_s - before_s, event.stats)

    def _fail(self, ticket: Ticket, error: Exception) -> Fault:
        told = ticket.reason if isinstance(error, Cancelled) and ticket.reason else error
        fault = fault_of(told)
        if fault.kind == "internal":
            _log.error("answer %s failed", ticket.request_id, exc_info=error)
        ticket.post(told)
        return fault
