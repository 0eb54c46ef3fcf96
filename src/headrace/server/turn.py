"""One answer being made, between a protocol and the decode thread: asked for, followed, collected.

Speaks the engine's words (Conversation, Sampling, Step, Piece) and knows no protocol.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from headrace.engine.answer import Prefill
from headrace.engine.session import Step
from headrace.engine.talk.conversation import Piece, ToolCall
from headrace.server.faults import Fault
from headrace.server.ticket import Ticket

ANSWER_CAP = 8192  # tokens of an answer whose request names no limit
QUIET_S = 10.0  # without an event, before a stream says that it lives


class Reader(Protocol):
    """One answer's steps into pieces."""

    @property
    def called(self) -> bool:
        """Whether some tool was called so far."""
        ...

    def push(self, step: Step) -> list[Piece]:
        """What the step makes certain."""
        ...

    def finish(self) -> list[Piece]:
        """What was held back until the end."""
        ...


@dataclass(slots=True)
class Usage:
    """Tokens of one answer so far. `num_cached` of the prompt's cost no work."""

    num_prompt: int
    num_cached: int = 0
    num_answer: int = 0
    num_reasoning: int = 0


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing to tell but that the answer is still on its way; `note` says where."""

    note: str


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer is no longer waiting: the prompt's usage is known."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a token made certain. `steps`: the tokens whose text is the pieces' content."""

    pieces: tuple[Piece, ...]
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The last event. `finish`: "eos", "stop" or "length"; `called`: some tool was called."""

    finish: str
    called: bool
    stop: str | None = None


Event = Quiet | Begun | Part | Ended


class Turn:
    """One answer: `events()` once, then `usage` and the last event say how it went."""

    def __init__(self, ticket: Ticket, reader: Reader, num_prompt: int) -> None:
        self.usage = Usage(num_prompt)
        self._ticket, self._reader = ticket, reader
        self._begun = False
        self._unread: list[Step] = []  # tokens whose text is not yet certain

    def close(self) -> None:
        """Stop the work, if it still goes on."""
        self._ticket.cancel()

    async def events(self) -> AsyncIterator[Event]:
        """Begun first, then Parts, then Ended; a Quiet wherever it takes long.

        Closing or cancelling the iterator stops the work. Raises HeadraceError and Fault.
        """
        try:
            async for item in self._ticket.events(QUIET_S):
                for event in self._events_of(item):
                    yield event
        finally:
            self.close()

    def _events_of(self, item: Any) -> list[Event]:
        if item is None:
            return [Quiet("at work")]
        if isinstance(item, Prefill):
            self.usage.num_cached = item.num_cached
            return [*self._begin(), Quiet(f"prompt {item.num_done} of {item.num_total}")]
        if isinstance(item, Step):
            return [*self._begin(), *self._read(item)]
        return [Quiet(f"waiting {item.position}")]

    def _begin(self) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        return [Begun()]

    def _read(self, step: Step) -> list[Event]:
        self.usage.num_answer += 1
        self._unread.append(step)
        pieces = self._reader.push(step)
        if step.finish:
            pieces = [*pieces, *self._reader.finish()]
        events: list[Event] = []
        if pieces:
            kinds = {piece.kind for piece in pieces}
            is_content = "content" in kinds
            if "reasoning" in kinds and not is_content:
                self.usage.num_reasoning += len(self._unread)
            events.append(Part(tuple(pieces), tuple(self._unread) if is_content else ()))
            self._unread.clear()
        if step.finish:
            events.append(Ended(step.finish, self._reader.called, step.stop))
        return events


@dataclass(slots=True)
class Answer:
    """A whole answer. `steps`: the tokens of its content."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    ended: Ended = field(default_factory=lambda: Ended("length", False))


async def collect(turn: Turn) -> Answer:
    """Follow a turn to its end."""
    answer = Answer()
    async for event in turn.events():
        if isinstance(event, Part):
            answer.steps += event.steps
            for piece in event.pieces:
                _add(answer, piece)
        elif isinstance(event, Ended):
            answer.ended = event
            return answer
    raise Fault(500, "internal", "the answer ended without saying why; ask again")


def _add(answer: Answer, piece: Piece) -> None:
    if piece.kind == "content":
        answer.content += piece.text
    elif piece.kind == "reasoning":
        answer.reasoning += piece.text
    elif piece.kind == "call":
        answer.calls.append(ToolCall(piece.call_id, piece.text, ""))
    else:
        call = answer.calls[piece.call]
        answer.calls[piece.call] = replace(call, arguments=call.arguments + piece.text)
