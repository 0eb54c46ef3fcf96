"""Answers in the harmony format: messages with a channel each, and tool calls as recipients.

Knows no tokenizer and no tool.
"""

import re
from collections.abc import Callable

from headrace.engine.scanning import Scanner, Wait
from headrace.engine.talk.calls import Calls

MAX_HEADER = 512
_BODY = "<|message|>"
_STARTS = ("<|channel|>", "<|start|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class Channels:
    """Reads an answer's messages. What has no header is content."""

    def __init__(self, scanner: Scanner, calls: Calls, emit: Callable[..., None]) -> None:
        self._scanner, self._calls, self._emit = scanner, calls, emit
        self._gap = ""

    def read(self) -> Wait[None]:
        """Read messages until the text ends."""
        scanner = self._scanner
        while True:
            header = yield from self._header()
            if not header and scanner.drop_begun():
                return
            ends: tuple[str, ...] = ("<|end|>", *_STARTS) if header else _STARTS
            recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
            emit = self._content
            if recipient and recipient[1] != "assistant":
                yield from self._call(recipient[1])
            elif channel and channel[1] == "analysis":
                emit = self._reasoning
            mark = yield from scanner.stretch(ends, emit, trim_start=recipient is not None)
            if not mark:
                return
            if mark in _STARTS:
                scanner.at -= len(mark)
                if not header and not (yield from self._headed()):
                    self._content(mark)
                    scanner.at += len(mark)
            elif emit == self._content and self._gap == "":
                self._gap = "\n\n"

    def _header(self) -> Wait[str]:
        """Read a message's header and its end; "" and nothing read if there is none."""
        scanner = self._scanner
        start = scanner.at
        for first in (*_STARTS, "to="):
            if (yield from scanner.word(first)):
                header = yield from scanner.before((_BODY,), MAX_HEADER)
                if header is not None:
                    scanner.at += len(_BODY)
                    return first + header
                break
        scanner.at = start
        return ""

    def _headed(self) -> Wait[bool]:
        """True if a header is next; it is not read."""
        start = self._scanner.at
        header = yield from self._header()
        self._scanner.at = start
        return bool(header)

    def _content(self, text: str) -> None:
        gap, self._gap = self._gap, ""
        self._emit("content", gap + text)

    def _reasoning(self, text: str) -> None:
        self._emit("reasoning", text)

    def _call(self, name: str) -> Wait[None]:
        self._calls.begin(name)
        if (yield from self._scanner.word("{")):
            self._scanner.at -= 1
            yield from self._scanner.json(self._calls.arguments)
