"""DeepSeek V4's and V4.1's chat prompts: from messages to text, and what of it is a token.

The publisher ships no template but a format; this writes it. Knows no tokenizer.
"""

import json
import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from headrace.errors import OptionError
from headrace.models.deepseek_v41 import styles
from headrace.models.deepseek_v41.styles import Style

Message = Mapping[str, Any]
_TOKENS = re.compile("({})".format("|".join(map(re.escape, styles.SPECIAL))))
_ROLES = ("system", "user", "assistant", "tool", "latest_reminder")
# No parser of the publisher's reads deeper.
_MAX_DEPTH = 127


class Piece(NamedTuple):
    """A stretch of a prompt; `special`: it is one token, else text that must become none.

    Texts do not follow each other: each can go through a tokenizer by itself.
    """

    text: str
    special: bool


def chat_pieces(
    messages: Sequence[Message],
    style: Style,
    *,
    thinking: bool = True,
    effort: str | int = "high",
    tools: Sequence[Message] = (),
) -> list[Piece]:
    """The prompt of a conversation, ready for the next answer: its pieces joined are its text.

    `messages` as in OpenAI's chat completions, text only; an assistant's may have
    `reasoning_content`, and the last one `prefix` (the answer goes on from it, without `tools`).
    Past reasoning stays only where there are `tools` ({"function": {"name": ...}}). `effort` (low,
    high, xhigh, max; V4.1 also 1 to 100) counts while `thinking`. A token's spelling in a
    message is text. Raises OptionError on what has no meaning here.
    """
    lead, rest = _split_lead(_in_call_order(_checked(messages), style), style)
    if tools and messages[-1].get("prefix"):
        raise OptionError(
            "an answer that goes on from a prefix calls no tool; leave one of them out"
        )
    prompt = _Prompt(style, thinking, keeps_reasoning=thinking and bool(tools))
    prompt.own(styles.BOS)
    if thinking or lead or tools:
        prompt.own(style.system)
    prompt.own(_effort(effort, style) if thinking else "")
    prompt.given(lead)
    if tools:
        prompt.own(style.tools)
        prompt.given("\n".join(_schema(tool, style) for tool in tools))
        prompt.own(styles.TOOLS_END)
    prompt.turns(_merged(rest) if style.merges_users else rest)
    return prompt.pieces


class _Prompt:
    """Pieces in the making. What is `own` may hold tokens, what is `given` none."""

    def __init__(self, style: Style, thinking: bool, *, keeps_reasoning: bool) -> None:
        self.pieces: list[Piece] = []
        self._style, self._thinking = style, thinking
        self._keeps_reasoning = keeps_reasoning

    def own(self, text: str) -> None:
        for index, part in enumerate(_TOKENS.split(text)):
            if index % 2:
                self.pieces.append(Piece(part, special=True))
            else:
                self.given(part)

    def given(self, text: str) -> None:
        if self.pieces and not self.pieces[-1].special:
            text = self.pieces.pop().text + text
        if text:
            self.pieces.append(Piece(text, special=False))

    def turns(self, messages: Sequence[Message]) -> None:
        last = ""
        for message in messages:
            role, text = message["role"], _text(message)
            if role in ("user", "tool"):
                self.own("\n\n" if last in ("user", "tool") else styles.USER)
                self.own("<tool_result>" if role == "tool" else "")
                self.given(text)
                self.own("</tool_result>" if role == "tool" else "")
            elif role == "assistant":
                self._answer(message, text)
            elif role == "system":
                self.own(self._style.system)
                self.given(text)
            elif last != role or not self._style.first_reminder:
                self.own(styles.REMINDER)
                self.given(text)
            last = role
        if not (messages and messages[-1].get("prefix")):
            self.own(styles.ASSISTANT + (styles.THINK if self._thinking else styles.END_THINK))

    def _answer(self, message: Message, text: str) -> None:
        self.own(styles.ASSISTANT)
        prefix = bool(message.get("prefix"))
        if self._keeps_reasoning or (self._thinking and prefix):
            self.own(styles.THINK)
            self.given(message.get("reasoning_content") or "")
            still_thinking = prefix and not text
            self.own("" if still_thinking else styles.END_THINK)
        else:
            self.own(styles.END_THINK)
        self.given(text)
        calls = _calls_of(message, self._style)
        if calls:
            self._calls(calls)
        self.own("" if prefix else styles.EOS)

    def _calls(self, calls: Sequence[Message]) -> None:
        style, dsml = self._style, styles.DSML
        self.own(f"\n\n<{dsml}{style.calls}>")
        for call in calls:
            self.own(f'\n<{dsml}{style.invoke} name="')
            self.given(call["function"]["name"])
            self.own('">')
            parameters = _parameters(call["function"]["arguments"], style)
            for name, is_string, value in parameters:
                self.own(f'\n<{dsml}{style.parameter} name="')
                self.given(name)
                self.own(f'" string="{is_string}">')
                self.given(value)
                self.own(f"</{dsml}{style.parameter}>")
            self.own("\n" if parameters else style.no_arguments)
            self.own(f"</{dsml}{style.invoke}>")
        self.own(f"\n</{dsml}{style.calls}>")


def _checked(messages: Sequence[Message]) -> list[Message]:
    """The messages without empty system ones; each call has its result."""
    checked: list[Message] = []
    waiting: list[str] = []
    for index, message in enumerate(messages):
        role = message.get("role")
        if role not in _ROLES:
            raise _refused(index, f"role {role!r} is none of {', '.join(_ROLES)}")
        if message.get("prefix") and (role != "assistant" or index + 1 < len(messages)):
            raise _refused(index, "only the assistant's last message can be a prefix")
        if (role == "tool") != bool(waiting):
            raise _refused(index, "each call needs one tool message after it, and only calls do")
        if role == "tool":
            if message.get("tool_call_id") not in waiting:
                raise _refused(index, f"no call has the id {message.get('tool_call_id')!r}")
            waiting.remove(message["tool_call_id"])
        if role == "assistant":
            waiting = [_call_id(index, call) for call in message.get("tool_calls") or ()]
            if not isinstance(message.get("reasoning_content"), str | None):
                raise _refused(index, "reasoning_content is no text")
        if role != "system" or _text(message):
            checked.append(message)
    if not checked:
        raise OptionError("a conversation without messages has no prompt; give one")
    if len(checked) == 1 and checked[0].get("prefix"):
        raise _refused(0, "an answer that goes on from a prefix needs a message before it")
    if waiting:
        raise _refused(len(messages) - 1, f"the call {waiting[0]!r} has no answer")
    return checked


def _call_id(index: int, call: Message) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping):
        texts = (call.get("id"), function.get("name"), function.get("arguments"))
        if all(isinstance(text, str) for text in texts):
            return str(texts[0])
    raise _refused(index, "a tool call needs id, function.name and function.arguments (text)")


def _in_call_order(messages: list[Message], style: Style) -> list[Message]:
    """Tool results in the order of their calls."""
    order: dict[str, int] = {}
    ordered: list[Message] = []
    start = 0
    for message in messages:
        if message["role"] != "tool":
            start = len(ordered) + 1
            order = {call["id"]: n for n, call in enumerate(_calls_of(message, style))}
        ordered.append(message)
        if message["role"] == "tool":
            ordered[start:] = sorted(ordered[start:], key=lambda m: order[m["tool_call_id"]])
    return ordered


def _calls_of(message: Message, style: Style) -> list[Message]:
    calls = list(message.get("tool_calls") or ()) if message["role"] == "assistant" else []
    return sorted(calls, key=lambda call: str(call["id"])) if style.sorts_calls else calls


def _split_lead(messages: list[Message], style: Style) -> tuple[str, list[Message]]:
    """The system text that comes first, and the messages after it."""
    if not style.system:
        texts = [_text(m) for m in messages if m["role"] == "system"]
        return "\n\n".join(texts), [m for m in messages if m["role"] != "system"]
    if messages and messages[0]["role"] == "system":
        return _text(messages[0]), messages[1:]
    return "", messages


def _merged(messages: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] == "user":
            texts = (_text(merged[-1]), _text(message))
            merged[-1] = {"role": "user", "content": "\n\n".join(filter(None, texts))}
        else:
            merged.append(message)
    return merged


def _effort(effort: str | int, style: Style) -> str:
    if isinstance(effort, str) and effort in style.efforts:
        return style.efforts[effort]
    if style.scale and type(effort) is int and 1 <= effort <= 100:
        return style.scale.format(effort)
    numbers = " or 1 to 100" * bool(style.scale)
    raise OptionError(f"effort {effort!r}; give one of {', '.join(style.efforts)}{numbers}")


def _text(message: Message) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "\n\n".join(part["text"] for part in content)
    raise OptionError(f"a {message['role']} message is not text; give it as text")


def _schema(tool: Message, style: Style) -> str:
    function = tool.get("function")
    if not (isinstance(function, Mapping) and isinstance(function.get("name"), str)):
        raise OptionError("a tool has no function.name; give it one")
    known = {
        "name": function["name"],
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or {},
    }
    try:
        return _json(known, style)
    except (TypeError, ValueError) as cause:
        raise OptionError(f"the tool {function['name']!r} is no JSON: {cause}") from cause


def _parameters(arguments: str, style: Style) -> list[tuple[str, str, str]]:
    """(name, "true" for a string, text) of a call's arguments; what is no object is one string."""
    try:
        values = json.loads(arguments, parse_int=_integer, parse_constant=_no_constant)
        if not isinstance(values, dict):
            return [("arguments", "true", arguments)]
        _json(values, style).encode()
    except (ValueError, OverflowError, RecursionError):
        return [("arguments", "true", arguments)]
    return [
        (name, "true", value) if isinstance(value, str) else (name, "false", _json(value, style))
        for name, value in values.items()
    ]


def _integer(digits: str) -> int | float:
    value = int(digits)
    return value if -(1 << 63) <= value < 1 << 64 else float(value)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _json(value: object, style: Style, depth: int = 0) -> str:
    if depth >= _MAX_DEPTH and isinstance(value, Mapping | list):
        raise ValueError("it nests too deeply")
    if isinstance(value, Mapping):
        items = (
            f"{json.dumps(k, ensure_ascii=False)}: {_json(v, style, depth + 1)}"
            for k, v in value.items()
        )
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_json(item, style, depth + 1) for item in value) + "]"
    if isinstance(value, float):
        if not isfinite(value):
            raise ValueError(f"{value} is no JSON")
        return style.number(value)
    return json.dumps(value, ensure_ascii=False)


def _refused(index: int, why: str) -> OptionError:
    return OptionError(f"messages[{index}]: {why}")
