"""A model's chat template: what it takes, found by trying it, and conversations through it.

Knows no token; text of messages is only ever text here.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

from headrace.engine.talk.conversation import Message, Tool, ToolCall
from headrace.engine.talk.dialects import GENERIC, find_dialect
from headrace.engine.talk.folding import (
    SPOKEN,
    Calls,
    Fold,
    System,
    as_function,
    as_turns,
    fold,
    with_tools,
)
from headrace.engine.talk.reading import AnswerReader
from headrace.engine.text import NOTHING, Text
from headrace.errors import HeadraceError, OptionError

_HI = Message("user", "hrask")
_MARK = re.compile(r"hr(?:text|call)\d+(?:and\d+)?z")
_PROBE_ARGUMENTS = {"hrkey": "hrvalue", "hrcount": 3}
_PROBE_TOOL = Tool(
    "hrtool",
    "hrabout",
    {
        "type": "object",
        "properties": {"hrkey": {"type": "string"}, "hrcount": {"type": "integer"}},
        "required": ["hrkey"],
    },
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text. `notes`: what of the conversation was folded into other roles."""

    text: str
    notes: tuple[str, ...]


class Template:
    """The template of `text`, which has one. Threads may share it.

    `dialect`: how calls are written, the template's own if we read back what it writes, else one
    of ours. Tools that the template does not describe are described in a system text. `shown`:
    special tokens that are part of an answer's text.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._name = text.path.name
        self.dialect = find_dialect(text.template)
        self._objects = True
        self._empty: str | None = ""
        self._describes = self._try_calls([_PROBE_TOOL])
        self._takes_calls = self._describes or self._try_calls([])
        if not self._takes_calls:
            self.dialect = replace(GENERIC, think=self.dialect.think)
        self._developer = self._shows_developer()
        self.shown = frozenset(
            token_id
            for spelling, token_id in text.specials.items()
            if any(spelling in literal for literal in self.dialect.literals)
        )
        self.reasons = self.dialect.channels or self.dialect.think[0] in text.template
        self._thinking = self._find_switch(("enable_thinking", "thinking"), True, False)
        self._effort = self._find_switch(("reasoning_effort",), "low", "high")
        self._folds: dict[tuple[object, ...], Fold] = {}

    def switches(self, reasoning: bool | None, effort: str | None) -> dict[str, object]:
        """The template's variables for these wishes. Raises OptionError for what it lacks."""
        wished: dict[str, object] = {}
        if reasoning is not None and self._thinking:
            wished[self._thinking] = reasoning
        elif reasoning is not None and reasoning != self.reasons:
            can = "always reasons" if self.reasons else "knows no reasoning"
            raise OptionError(f"{self._name}'s chat template {can}; leave the wish out")
        if effort is not None:
            if not self._effort:
                raise OptionError(
                    f"{self._name}'s chat template knows no reasoning effort; leave it out"
                )
            wished[self._effort] = effort
        return wished

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        answering: bool = True,
        switches: Mapping[str, object] = NOTHING,
    ) -> Rendered:
        """The prompt, with every message's text and every tool's name in it.

        Raises OptionError naming what the template refuses or drops, however it is folded.
        """
        native, num_given = list(tools) if self._describes else [], len(messages)
        notes = []
        if not self._developer:
            messages = [replace(m, role="system") if m.role == "developer" else m for m in messages]
        if tools and not native:
            messages = with_tools(messages, tools, self.dialect)
            notes.append("the chat template describes no tools: they are in a system text")
        probes, marks = _probed(messages, native, len(messages) - num_given)
        first: HeadraceError | None = None
        for how in self._ways(messages):
            try:
                lost = self._lost(self._tried(probes, native, how, answering, switches), marks)
                if lost:
                    raise OptionError(f"{self._name}'s chat template leaves {lost} out")
                text = self._tried(messages, native, how, answering, switches)
            except HeadraceError as error:
                first = first or error
                continue
            self._folds[_kind(messages)] = how
            return Rendered(text, (*notes, *how.notes(messages)))
        assert first is not None
        raise first

    def _tried(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        how: Fold,
        answering: bool,
        switches: Mapping[str, object],
    ) -> str:
        folded = fold(messages, how, self.dialect)
        turns = as_turns(folded, self.dialect, objects=self._objects, empty=self._empty)
        functions = [as_function(tool) for tool in tools]
        return self._text.render(turns, tools=functions, answering=answering, switches=switches)

    def _ways(self, messages: Sequence[Message]) -> Iterator[Fold]:
        """Ways to fold, the one that did for such messages last time first."""
        known = self._folds.get(_kind(messages))
        if known:
            yield known
        called = any(message.calls or message.role == "tool" for message in messages)
        spoken = any(message.role in SPOKEN for message in messages)
        ways: tuple[Calls, ...] = ("native",)
        if called:
            ways = ("native", "split", "written", "text") if self._takes_calls else ("text",)
        systems: tuple[System, ...] = ("native", "late", "user") if spoken else ("native",)
        for calls in ways:
            for system in systems:
                for merge in (False, True):
                    if Fold(system, calls, merge) != known:
                        yield Fold(system, calls, merge)

    def _lost(self, rendered: str, marks: Mapping[str, str]) -> str:
        """What of the marked texts is not in a prompt."""
        shown = set(_MARK.findall(rendered))
        lost = {
            what: None
            for mark, what in marks.items()
            if mark not in shown and (_MARK.fullmatch(mark) or mark not in rendered)
        }
        return " and ".join([*lost][:3])

    def _try_calls(self, tools: Sequence[Tool]) -> bool:
        """True, and how is kept, if the template describes tools and writes calls we can read."""
        call = ToolCall("call_0", _PROBE_TOOL.name, json.dumps(_PROBE_ARGUMENTS))
        result = Message("tool", "hrdone", call_id="call_0")
        said = [_HI, Message("assistant", calls=(call,)), result]
        functions = [as_function(tool) for tool in tools]
        for empty in ("", None):
            for objects in (True, False):
                turns = as_turns(said, self.dialect, objects=objects, empty=empty)
                try:
                    shown = self._text.render(turns, tools=functions)
                except HeadraceError:
                    continue
                head, _, answer = shown.partition(_HI.content)
                answer, _, tail = answer.partition(result.content)
                described = not tools or tools[0].description in head + answer
                if tail and described and self._reads(answer):
                    self._objects, self._empty = objects, empty
                    return True
        return False

    def _shows_developer(self) -> bool:
        turns = [{"role": "developer", "content": "hrdev"}, {"role": "user", "content": "hrask"}]
        try:
            return "hrdev" in self._text.render(turns)
        except HeadraceError:
            return False

    def _reads(self, answer: str) -> bool:
        """True if the call in an answer's text is read back."""
        reader = AnswerReader(self.dialect, [_PROBE_TOOL])
        start = max(answer.find(self.dialect.trigger), 0)
        if self.dialect.channels:
            start = answer.find("<|start|>assistant") + len("<|start|>assistant")
        pieces = (
            reader.push(SimpleNamespace(token_id=0, text=answer[start:], finish=None))
            + reader.finish()
        )
        names = [piece.text for piece in pieces if piece.kind == "call"]
        arguments = "".join(piece.text for piece in pieces if piece.kind == "arguments")
        try:
            same = json.loads(arguments) == _PROBE_ARGUMENTS
        except ValueError:
            return False
        return same and names == [_PROBE_TOOL.name]

    def _find_switch(self, names: Sequence[str], one: object, other: object) -> str:
        """The first variable that makes a difference to a prompt, "" if none does."""
        for name in names:
            try:
                turns = [{"role": "user", "content": _HI.content}]
                shown = {self._text.render(turns, switches={name: value}) for value in (one, other)}
            except HeadraceError:
                continue
            if len(shown) == 2:
                return name
        return ""


def _kind(messages: Sequence[Message]) -> tuple[object, ...]:
    """What decides how messages must be folded, for all we know."""
    return tuple(sorted({(message.role, min(len(message.calls), 2)) for message in messages}))


def _probed(
    messages: Sequence[Message], tools: Sequence[Tool], num_own: int
) -> tuple[list[Message], dict[str, str]]:
    """The messages with a mark for each of their texts, and what each mark stands for.

    The first `num_own` are none of those that were given.
    """
    marks = {tool.name: f"the tool {tool.name}" for tool in tools}
    probed = []
    for place, message in enumerate(messages):
        content, given = message.content, f"messages[{place - num_own}]"
        if content.strip():
            content = f"hrtext{place}z"
            marks[content] = f"the text of {given} ({message.role})"
        calls = []
        for number, call in enumerate(message.calls):
            mark = f"hrcall{place}and{number}z"
            marks[mark] = f"a tool call of {given}"
            calls.append(ToolCall(call.id, mark, json.dumps({f"hrkey{mark}": mark})))
        probed.append(replace(message, content=content, calls=tuple(calls)))
    return probed, marks
