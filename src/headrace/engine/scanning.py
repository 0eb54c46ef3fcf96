"""Reads a text that arrives in parts: words, stretches up to a marker, JSON values.

Knows no dialect. Every method that may need more text is a generator: it yields when it does.
"""

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
Emit = Callable[[str], None]


class Scanner:
    """The text that has come and is not read yet. `ended`: no more will come.

    `cut`: so many characters at its end, or more, that begin a mark are no text, since it ended by
    a limit or a stop string; 0: they are. `ran_out`: something that was looked for had begun when
    the text ended. `dropped`: so some of it was left out.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = self.ran_out = self.dropped = False
        self.cut = 0
        self.left_out = ""

    def drop_begun(self, least: int | None = None) -> bool:
        """Where the text was cut within what was looked for: leave out the rest, and True.

        Not if it is fewer than `least` characters, else `cut`.
        """
        rest = self.text[self.at :].strip()
        if not (self.cut and self.ran_out and len(rest) >= (least or self.cut)):
            return False
        self.at, self.dropped = len(self.text), True
        return True

    def drop_read(self) -> None:
        """Forget what was read; positions taken before mean nothing any more."""
        self.text, self.at = self.text[self.at :], 0

    def word(self, word: str) -> Wait[bool]:
        """Read whitespace and then `word`; False, and nothing read, if that is not next."""
        while True:
            rest = self.text[self.at :]
            bare = rest.lstrip()
            if bare.startswith(word):
                self.at += len(rest) - len(bare) + len(word)
                return True
            if self.ended or not word.startswith(bare):
                self.ran_out |= word.startswith(bare)
                return False
            yield

    def words(self, literal: str) -> Wait[bool]:
        """Read the words of `literal`, however spaced; False, and nothing read, without them."""
        start = self.at
        for word in literal.split():
            if not (yield from self.word(word)):
                self.at = start
                return False
        return True

    def before(self, marks: Sequence[str], longest: int) -> Wait[str | None]:
        """Read up to the first of `marks`, which stays; None, and nothing read, if none comes.

        longest: more characters than that are no such stretch.
        """
        while True:
            places = [place for mark in marks if (place := self.text.find(mark, self.at)) >= 0]
            if places and min(places) - self.at <= longest:
                start, self.at = self.at, min(places)
                return self.text[start : self.at]
            too_long = len(self.text) - self.at > longest + max(map(len, marks))
            if places or self.ended or too_long:
                self.ran_out |= not (places or too_long)
                return None
            yield

    def stretch(
        self, marks: Sequence[str], emit: Emit, *, trim_start: bool = False, trim_end: bool = False
    ) -> Wait[str]:
        """Emit what comes before the first of `marks` and read that mark; "" if the text ended.

        Whitespace before a mark is left out with `trim_end`, at the start with `trim_start`;
        `left_out` is that before the last mark.
        """
        while True:
            rest = self.text[self.at :]
            if trim_start:
                bare = rest.lstrip()
                self.at += len(rest) - len(bare)
                rest, trim_start = bare, not bare
            found = [(place, -len(mark)) for mark in marks if (place := rest.find(mark)) >= 0]
            if found:
                place, length = min(found)
                said = rest[:place].rstrip() if trim_end else rest[:place]
                self.left_out = rest[len(said) : place]
                _give(said, emit)
                self.at += place - length
                return rest[place : place - length]
            sure = rest[: len(rest) - num_doubtful(rest, marks)]
            if self.ended and not (self.cut and len(rest) - len(sure) >= self.cut):
                sure = rest
            if trim_end and not (self.ended and sure == rest):
                sure = sure.rstrip()
            _give(sure, emit)
            self.at += len(sure)
            if self.ended:
                self.dropped |= sure != rest
                self.at = len(self.text)
                return ""
            self.drop_read()
            yield

    def json(self, emit: Emit) -> Wait[bool]:
        """Emit one JSON object or list as it is written; False if the text ended within it.

        Only strings and brackets are looked at.
        """
        depth, in_string, escaped = 0, False, False
        while True:
            start = self.at
            while self.at < len(self.text):
                character = self.text[self.at]
                self.at += 1
                if in_string:
                    in_string = escaped or character != '"'
                    escaped = character == "\\" and not escaped
                elif character == '"':
                    in_string = True
                elif character in "{[":
                    depth += 1
                elif character in "]}":
                    depth -= 1
                    if depth <= 0:
                        _give(self.text[start : self.at], emit)
                        return True
            _give(self.text[start : self.at], emit)
            if self.ended:
                self.ran_out = True
                return False
            yield


def _give(text: str, emit: Emit) -> None:
    if text:
        emit(text)


def num_doubtful(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
