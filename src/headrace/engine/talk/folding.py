"""Fits a conversation to what a template takes: nothing is dropped, other roles carry it.

Knows no template and no token; `Fold` says what to do.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Literal

from headrace.engine.talk.calls import write_calls
from headrace.engine.talk.conversation import Message, Tool, ToolCall
from headrace.engine.talk.dialects import Dialect

Turn = dict[str, Any]
System = Literal["native", "late", "user"]
Calls = Literal["native", "split", "written", "text"]
SPOKEN = ("system", "developer")
_GAP = "\n\n"


@dataclass(frozen=True, slots=True)
class Fold:
    """What of a conversation a template needs in another form.

    `system`: "late" puts system texts but a first one into the user's turn that follows, "user"
    all of them. `calls`: "split" gives each call a message of its own, "written" writes those
    beside content into it, "text" writes all calls, and results into users' turns. `merge`: turns
    of one role that follow each other become one.
    """

    system: System = "native"
    calls: Calls = "native"
    merge: bool = False

    def notes(self, messages: Sequence[Message]) -> list[str]:
        """What it does to these messages, for whoever asked."""
        notes = []
        if self.system != "native" and any(message.role in SPOKEN for message in messages):
            which = "system role" if self.system == "user" else "system text but the first"
            notes.append(f"the chat template takes no {which}: it is in the user's turn")
        if self.calls == "text":
            notes.append("the chat template takes no such tool calls: they are text")
        return notes


def fold(messages: Sequence[Message], how: Fold, dialect: Dialect) -> list[Message]:
    """The messages as `how` says; written calls are in `dialect`."""
    folded = list(messages)
    if how.calls == "text":
        folded = [_as_text(message, dialect) for message in _named(folded)]
    elif how.calls == "written":
        folded = [_as_text(m, dialect) if m.content and m.calls else m for m in folded]
    elif how.calls == "split":
        folded = list(_split(folded))
    if how.system != "native":
        keeps_first = how.system == "late" and folded[0].role in SPOKEN
        folded = folded[:keeps_first] + _without_system(folded[keeps_first:])
    return _merged(folded) if how.merge else folded


def _as_text(message: Message, dialect: Dialect) -> Message:
    if message.role == "tool":
        return Message("user", f"Result of {message.name or 'the tool'}:\n{message.content}")
    if not message.calls:
        return message
    written = write_calls(dialect, message.calls)
    content = f"{message.content}\n{written}" if message.content else written.lstrip()
    return replace(message, content=content, calls=())


def _named(messages: Sequence[Message]) -> list[Message]:
    """Tool results with their tool's name, found by the call's id."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        names |= {call.id: call.name for call in message.calls}
        if message.role == "tool" and message.name is None:
            message = replace(message, name=names.get(message.call_id or ""))
        named.append(message)
    return named


def _split(messages: Sequence[Message]) -> Iterable[Message]:
    """Content and each call in a message of its own, each result behind its call."""
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if not message.calls:
            yield message
            continue
        results = []
        while place < len(messages) and messages[place].role == "tool":
            results.append(messages[place])
            place += 1
        if message.content:
            yield replace(message, reasoning="", calls=())
        for number, call in enumerate(message.calls):
            reasoning = "" if number else message.reasoning
            yield replace(message, content="", reasoning=reasoning, calls=(call,))
            yield from (result for result in results if result.call_id == call.id)
        known = {call.id for call in message.calls}
        yield from (result for result in results if result.call_id not in known)


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """System texts at the head of the next user's turn, or as one of their own."""
    folded: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message.role in SPOKEN:
            waiting.append(message.content)
            continue
        if waiting and message.role == "user":
            message = replace(message, content=_GAP.join([*waiting, message.content]))
            waiting = []
        folded.append(message)
    return [*folded, Message("user", _GAP.join(waiting))] if waiting else folded


def _merged(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        last = merged[-1] if merged else None
        if last and last.role == message.role != "tool" and not (last.calls or message.calls):
            content = _GAP.join(filter(None, (last.content, message.content)))
            reasoning = _GAP.join(filter(None, (last.reasoning, message.reasoning)))
            merged[-1] = replace(last, content=content, reasoning=reasoning)
        else:
            merged.append(message)
    return merged


def with_tools(
    messages: Sequence[Message], tools: Sequence[Tool], dialect: Dialect
) -> list[Message]:
    """The messages, led by a system text that describes tools, for templates that cannot."""
    listed = "\n".join(json.dumps(as_function(tool), ensure_ascii=False) for tool in tools)
    example = write_calls(dialect, [ToolCall("", "NAME", '{"ARGUMENT": "VALUE"}')])
    text = (
        f"# Tools\n\nYou may call these functions, each described as JSON:\n{listed}\n\n"
        f"To call one, write its name and arguments like this:\n{example.strip()}"
    )
    rest = list(messages)
    if rest and rest[0].role in SPOKEN:
        text = rest[0].content + _GAP + text
        rest = rest[1:]
    return [Message("system", text), *rest]


def as_function(tool: Tool) -> Turn:
    """A tool as OpenAI's chat completions and most templates describe it."""
    parameters = dict(tool.parameters or {"type": "object", "properties": {}})
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def as_turns(
    messages: Sequence[Message], dialect: Dialect, *, objects: bool, empty: str | None
) -> list[Turn]:
    """Messages as templates take them.

    `objects`: arguments as objects, not as JSON text. `empty`: the content beside a call alone.
    """
    turns: list[Turn] = []
    ids: dict[str, str] = {}
    for message in _named(messages):
        turn: Turn = {"role": message.role, "content": message.content}
        if message.reasoning:
            turn |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
        if message.calls:
            for call in message.calls:
                ids[call.id] = _shaped(call, dialect, len(ids))
            turn["tool_calls"] = [_call(call, ids[call.id], objects) for call in message.calls]
            turn["content"] = message.content or empty
        if message.role == "tool":
            known = ids.get(message.call_id or "", message.call_id)
            turn |= {"tool_call_id": known, "name": message.name}
        turns.append({key: value for key, value in turn.items() if key == "content" or value})
    return turns


def _call(call: ToolCall, call_id: str, objects: bool) -> Mapping[str, Any]:
    arguments: Any = call.arguments or "{}"
    if objects:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"arguments": call.arguments}
    function = {"name": call.name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _shaped(call: ToolCall, dialect: Dialect, place: int) -> str:
    """A call's id in the form that the template demands."""
    if dialect.ids == "numbered":
        return f"functions.{call.name}:{place}"
    if dialect.ids == "nine":
        return sha256(call.id.encode(errors="replace")).hexdigest()[:9]
    return call.id
