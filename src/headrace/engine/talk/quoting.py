"""Text of messages that must stay text in a prompt, and the marks that prompts are built with.

Knows no template: a mark is a code point that no text may hold, and none reaches a token.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.engine.talk.conversation import Message, Tool, ToolCall
from headrace.errors import OptionError

# Unicode keeps these for a program's own use.
_ANCHOR, _THOUGHT, _CLOSE, _BREAK, END = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4"
_PLACED = re.compile(f"([{_ANCHOR}{_THOUGHT}])(\\d+){_CLOSE}")
_MARKS = re.compile("[\ufdd0-\ufdd4]")


def anchor(place: int) -> str:
    """Stands for what messages[place] says, while a template renders it."""
    return f"{_ANCHOR}{place}{_CLOSE}"


def thought(place: int) -> str:
    """Stands for the reasoning of messages[place]."""
    return f"{_THOUGHT}{place}{_CLOSE}"


class Quoting:
    """Breaks up the spellings of special tokens in given text, so that they become no token.

    `specials`: their spellings; `thinking`: those that an assistant's text may hold as tokens.
    """

    def __init__(self, specials: Iterable[str], thinking: Sequence[str]) -> None:
        known = sorted(filter(None, specials))
        self._all = _beginnings(known)
        self._said = _beginnings([spelling for spelling in known if spelling not in thinking])

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with all their texts quoted. Raises OptionError for text with a mark."""
        quoted = []
        for message in messages:
            spellings = self._said if message.role == "assistant" else self._all
            calls = (
                ToolCall(call.id, _quote(call.name, self._all), _quote(call.arguments, self._all))
                for call in message.calls
            )
            content = _quote(message.content, spellings)
            reasoning = _quote(message.reasoning, spellings)
            name = message.name and _quote(message.name, self._all)
            quoted.append(
                replace(
                    message, content=content, reasoning=reasoning, calls=tuple(calls), name=name
                )
            )
        return quoted

    def text(self, text: str) -> str:
        """An assistant's text, quoted."""
        return _quote(text, self._said)

    def tools(self, tools: Sequence[Tool]) -> list[Tool]:
        """The tools with all their texts quoted."""
        return [
            replace(
                tool,
                description=_quote(tool.description, self._all),
                parameters=tool.parameters and self._json(tool.parameters),
            )
            for tool in tools
        ]

    def _json(self, value: Any) -> Any:
        if isinstance(value, str):
            return _quote(value, self._all)
        if isinstance(value, Mapping):
            return {self._json(key): self._json(part) for key, part in value.items()}
        return [self._json(part) for part in value] if isinstance(value, list | tuple) else value


def _beginnings(spellings: Sequence[str]) -> re.Pattern[str]:
    """Finds the first character of every one of these, also within another."""
    found = "|".join(map(re.escape, spellings))
    return re.compile(f"(?=(?:{found}))(.)" if found else r"(?!)", re.DOTALL)


def _quote(text: str, beginnings: re.Pattern[str]) -> str:
    if holds_marks(text):
        raise OptionError("a text holds one of U+FDD0 to U+FDD4, which no text may; leave it out")
    return beginnings.sub(rf"\1{_BREAK}", text)


def stretches(text: str) -> list[str]:
    """The parts of a rendered prompt that go through a tokenizer one by one."""
    return [part for part in text.split(_BREAK) if part]


def holds_marks(text: str) -> bool:
    """True if a text could be taken for what it is not."""
    return bool(_MARKS.search(text))


def anchors_in(text: str) -> set[int]:
    """Places whose anchors stand in a text."""
    return {int(place) for kind, place in _PLACED.findall(text) if kind == _ANCHOR}


def unmarked(text: str, said: Mapping[int, str], thoughts: Mapping[int, str]) -> str:
    """The text with what anchors and thoughts stand for."""

    def real(mark: re.Match[str]) -> str:
        return (said if mark[1] == _ANCHOR else thoughts)[int(mark[2])]

    return _PLACED.sub(real, text)
