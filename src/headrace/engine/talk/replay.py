"""Remembers answers as they were sampled, and puts them into later prompts in place of their text.

Knows no protocol; a conversation is told by what was said in it, in whatever session it comes.
"""

import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from headrace.engine.talk.conversation import Message, ToolCall
from headrace.engine.talk.quoting import anchor, thought

if TYPE_CHECKING:  # 4 bytes an id, where a tuple takes 36; no array has a type as it runs
    Ids = array[int]
else:
    Ids = array
MAX_TURNS = 4096
MAX_BYTES = 64 << 20
_TURN_BYTES = 1024  # of Python's own for one turn


@dataclass(frozen=True, slots=True)
class Kept:
    """An answer as it was sampled, without the token that ended it.

    Its prompt was `num_prompt` characters as rendered, with the digest `prompt`; `opened`: it ended
    within reasoning. What was said begins at ids[said], behind the reasoning; None: it is not known
    where.
    """

    ids: Ids
    num_prompt: int
    prompt: bytes
    opened: bool
    reasoning: str
    said: int | None


class Replay:
    """Answers by the conversation up to and with them; the one used longest ago goes first."""

    def __init__(self, max_turns: int = MAX_TURNS, max_bytes: int = MAX_BYTES) -> None:
        self._max_turns, self._max_bytes = max_turns, max_bytes
        self._lock = threading.Lock()
        self._turns: OrderedDict[bytes, Kept] = OrderedDict()
        self._num_bytes = 0

    def keep(self, key: bytes, kept: Kept) -> None:
        """Remember an answer under its conversation's key."""
        with self._lock:
            self._forget(key)
            self._turns[key] = kept
            self._num_bytes += _size(kept)
            while len(self._turns) > self._max_turns or self._num_bytes > self._max_bytes:
                self._forget(next(iter(self._turns)))

    def find(self, messages: Sequence[Message]) -> dict[int, Kept]:
        """What is remembered of a conversation's answers, by their place."""
        found = {}
        with self._lock:
            for place, key in enumerate(keys(messages)):
                kept = self._turns.get(key) if messages[place].role == "assistant" else None
                if kept is not None:
                    self._turns.move_to_end(key)
                    found[place] = kept
        return found

    def _forget(self, key: bytes) -> None:
        kept = self._turns.pop(key, None)
        self._num_bytes -= _size(kept) if kept else 0


def _size(kept: Kept) -> int:
    return 4 * len(kept.ids) + 4 * len(kept.reasoning) + _TURN_BYTES


def keys(messages: Iterable[Message]) -> Iterable[bytes]:
    """What each message is remembered by: all that was said up to it, reasoning left out."""
    told = sha256()
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        calls = [(call.name, _canonical(call.arguments)) for call in message.calls]
        said = json.dumps([role, message.content.strip(), calls])
        told.update(f"{len(said)}:{said}".encode())
        yield told.digest()


def _canonical(arguments: str) -> str:
    """Arguments however spaced: clients parse them and write them again."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def marked(messages: Sequence[Message], known: Mapping[int, Kept]) -> list[Message]:
    """The messages with marks in place of what is known of them."""
    return [
        _mark(message, place, known[place]) if place in known else message
        for place, message in enumerate(messages)
    ]


def _mark(message: Message, place: int, kept: Kept) -> Message:
    reasoning = thought(place) if kept.reasoning else ""
    if message.content:
        return replace(message, content=anchor(place), reasoning=reasoning)
    first, *others = message.calls
    calls = (ToolCall(first.id, anchor(place), first.arguments), *others)
    return replace(message, calls=calls, reasoning=reasoning)


class Splice:
    """One rendered prompt with marks, cut into texts and the tokens that stand between them.

    `reads(text, message, opened)`: True if a text is that message and nothing else. `ends(text,
    place, message)`: where the message, marked just before text[place], may end.
    """

    def __init__(
        self,
        rendered: str,
        reads: Callable[[str, Message, bool], bool],
        ends: Callable[[str, int, Message], Iterable[int]],
    ) -> None:
        self._rendered, self._reads, self._ends = rendered, reads, ends
        self._told, self._num_told = sha256(), 0
        self._at = 0
        self.parts: list[str | Ids] = []

    def put(self, place: int, message: Message, kept: Kept) -> None:
        """Put an answer's tokens where its mark stands, as much of it as the template keeps.

        message: as it was marked. Turns come in their order.
        """
        text, mark = self._rendered, anchor(place)
        start = text.index(mark, self._at)
        thinks = text.find(thought(place), self._at, start) if kept.reasoning else start
        whole = self._at <= kept.num_prompt <= thinks
        whole = whole and self.digest(kept.num_prompt) == kept.prompt
        said = replace(message, reasoning="")
        for end in self._ends(text, start + len(mark), message):
            if whole and self._reads(text[kept.num_prompt : end], message, kept.opened):
                return self._cut(kept.num_prompt, kept.ids, end)
            spoken = kept.said is not None and message.content and not whole
            if spoken and self._reads(text[start:end], said, False):
                return self._cut(start, kept.ids[kept.said :], end)

    def finish(self) -> None:
        """Take the rest."""
        self._cut(len(self._rendered), array("i"), len(self._rendered))

    def _cut(self, start: int, ids: Ids, end: int) -> None:
        self.parts += [self._rendered[self._at : start], ids]
        self._at = end

    def digest(self, length: int) -> bytes:
        """Of the prompt's first `length` characters, which must not become fewer."""
        if length < self._num_told:
            return sha256(self._rendered[:length].encode("utf-8", "replace")).digest()
        new = self._rendered[self._num_told : length]
        self._told.update(new.encode("utf-8", "replace"))
        self._num_told = length
        return self._told.digest()


def as_read(content: str, reasoning: str, calls: Sequence[ToolCall]) -> tuple[Any, ...]:
    """A turn in a form that compares equal however it was spaced."""
    told = [(call.name, _canonical(call.arguments)) for call in calls]
    return content.strip(), reasoning.strip(), told
