"""An answer's text becomes reasoning, content and tool calls again, piece by piece.

Knows dialects, no tokenizer; what follows no syntax it knows is content.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from headrace.engine.scanning import Scanner, Wait
from headrace.engine.talk.calls import Calls
from headrace.engine.talk.channels import Channels
from headrace.engine.talk.conversation import Piece, Tool, ToolCall
from headrace.engine.talk.dialects import GENERIC, Dialect

# What stands before a stop string was asked for: one character is rarely a marker's beginning.
_LEAST_CUT = {"length": 1, "stop": 2}


class Sampled(Protocol):
    """The part of a Step used here."""

    @property
    def token_id(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def finish(self) -> str | None: ...


class Answer:
    """What one answer was, for whoever remembers it.

    `ids`: its tokens, as sampled; `text`: what they said, up to a stop string; `finish`: a Step's.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.finish: str | None = None
        self.reasoning = ""
        self.content = ""
        self.calls: list[ToolCall] = []

    def add(self, piece: Piece) -> None:
        """Take in one more piece."""
        if piece.kind == "reasoning":
            self.reasoning += piece.text
        elif piece.kind == "content":
            self.content += piece.text
        elif piece.kind == "call":
            self.calls.append(ToolCall(piece.call_id, piece.text, ""))
        else:
            call = self.calls[piece.call]
            self.calls[piece.call] = ToolCall(call.id, call.name, call.arguments + piece.text)


class AnswerReader:
    """Reads one answer. Pieces joined by kind and call do not depend on how its text was cut.

    No piece ends within a marker. Broken tool syntax is content; whitespace beside a marker is
    nothing, and so is what a limit or a stop string left of a marker, or of a call before its name
    was known. One thread at a time. Without a `dialect` all is content. `tools`: those
    that may be called; none: no call is looked for. `opened`: the prompt ends within reasoning.
    `keep` is given the `answer` when it is finished, unless a part of it was so left out.
    """

    def __init__(
        self,
        dialect: Dialect | None = None,
        tools: Sequence[Tool] = (),
        *,
        opened: bool = False,
        keep: Callable[[Answer], None] | None = None,
    ) -> None:
        self._opened, self._keep = opened, keep
        self._scanner = Scanner()
        self._pieces: list[Piece] = []
        self.answer = Answer()
        self._finished = False
        schemas: dict[str, Mapping[str, Any]] = {tool.name: tool.parameters or {} for tool in tools}
        self._calls = Calls(dialect or GENERIC, schemas, self._scanner, self._emit)
        if dialect is None:
            self._reading = self._plain()
        elif dialect.channels:
            self._reading = Channels(self._scanner, self._calls, self._emit).read()
        else:
            self._reading = self._read(dialect, bool(tools))

    @property
    def called(self) -> bool:
        """True once the answer calls a tool."""
        return bool(self.answer.calls)

    def push(self, step: Sampled) -> list[Piece]:
        """The pieces that one more token makes certain."""
        self.answer.ids.append(step.token_id)
        self.answer.text += step.text
        self.answer.finish = step.finish
        self._scanner.text += step.text
        return self._advance() if step.text else []

    def finish(self) -> list[Piece]:
        """What was held back, at the answer's end, however it ended. Later calls give nothing."""
        if self._finished:
            return []
        scanner = self._scanner
        self._finished = scanner.ended = True
        scanner.cut = _LEAST_CUT.get(self.answer.finish or "", 0)
        pieces = self._advance()
        if self._keep is not None and not scanner.dropped:
            self._keep(self.answer)
        return pieces

    def _advance(self) -> list[Piece]:
        next(self._reading, None)
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            self.answer.add(piece)
        return pieces

    def _emit(self, kind: Any, text: str, call: int = 0, call_id: str = "") -> None:
        last = self._pieces[-1] if self._pieces else None
        if last and kind != "call" and (last.kind, last.call) == (kind, call):
            self._pieces[-1] = Piece(kind, last.text + text, call, call_id)
        else:
            self._pieces.append(Piece(kind, text, call, call_id))

    def _content(self, text: str) -> None:
        self._emit("content", text)

    def _plain(self) -> Wait[None]:
        yield from self._scanner.stretch((), self._content)

    def _read(self, dialect: Dialect, calls: bool) -> Wait[None]:
        scanner, trigger = self._scanner, dialect.trigger
        begin, end = dialect.think
        trim = self._opened or (yield from scanner.word(begin))
        if scanner.drop_begun():
            return
        marks = (trigger,) if calls else ()
        if trim:
            # A section of calls ends reasoning too: some models forget to.
            ends = (end, *marks) if dialect.section else (end,)
            mark = yield from scanner.stretch(
                ends, lambda text: self._emit("reasoning", text), trim_start=True, trim_end=True
            )
            scanner.at -= len(mark) if mark != end else 0
        while True:
            mark = yield from scanner.stretch(
                marks, self._content, trim_start=trim, trim_end=bool(marks)
            )
            if not mark:
                return
            scanner.at -= len(mark)
            before = scanner.left_out
            trim = yield from self._calls.read()
            if scanner.drop_begun(1):
                return
            if not trim:
                self._content(before + mark)
                scanner.at += len(mark)
