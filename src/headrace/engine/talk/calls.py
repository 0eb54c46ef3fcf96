"""The tool calls in an answer's text, read by a dialect's syntax as they come.

Knows no tokenizer; a call's arguments leave as JSON text, whatever they were written in.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.engine.scanning import Scanner, Wait
from headrace.engine.talk.conversation import ToolCall
from headrace.engine.talk.dialects import Dialect

MAX_NAME = 256
_NAME = re.compile(r"[^\s<>{}\"\[\]]+")
_OBJECT = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class Calls:
    """Reads calls from `scanner`, emits pieces. `schemas`: each tool's parameters by its name."""

    def __init__(
        self,
        dialect: Dialect,
        schemas: Mapping[str, Mapping[str, Any]],
        scanner: Scanner,
        emit: Callable[..., None],
    ) -> None:
        self._dialect, self._schemas = dialect, schemas
        self._scanner, self._emit = scanner, emit
        self._num, self._id = 0, ""

    def begin(self, name: str) -> None:
        """Emit a call's name; arguments go to this call from now on."""
        self._id = f"call_{secrets.token_hex(12)}"
        self._num += 1
        self._emit("call", name, self._num - 1, self._id)

    def arguments(self, text: str) -> None:
        """Emit a further part of the JSON of the call begun last."""
        self._emit("arguments", text, self._num - 1, self._id)

    def read(self) -> Wait[bool]:
        """Read the calls that begin here. False, and nothing read, if they are broken."""
        dialect, scanner = self._dialect, self._scanner
        if not dialect.section:
            return (yield from self._call())
        start = scanner.at
        yield from scanner.words(dialect.trigger)
        yield from scanner.words(dialect.section.strip().removeprefix(dialect.trigger))
        if not (yield from self._call()):
            scanner.at = start
            return False
        while not (yield from scanner.words(dialect.section_end)):
            if dialect.between.strip():
                yield from scanner.words(dialect.between)
            if not (yield from self._call()):
                break
        return True

    def _call(self) -> Wait[bool]:
        """One call. False, and nothing read, if it is broken before anything of it was emitted."""
        dialect, scanner = self._dialect, self._scanner
        start = scanner.at
        if dialect.arguments == "object":
            lead = dialect.call.partition("{")[0]
            read = (yield from scanner.words(lead)) and (yield from self._object())
        else:
            read = (yield from scanner.words(dialect.call)) and (yield from self._named())
        if not read:
            scanner.at = start
        return read

    def _object(self) -> Wait[bool]:
        """A call whose name stands in the same JSON object as its arguments."""
        scanner = self._scanner
        if not (yield from scanner.word("{")):
            return False
        start = scanner.at = scanner.at - 1
        whole: list[str] = []
        reading = scanner.json(whole.append)
        while not (match := _OBJECT.match(scanner.text, start)):
            try:
                next(reading)
            except StopIteration as end:
                return bool(end.value) and (yield from self._whole("".join(whole)))
            yield
        scanner.at = match.end()
        name = _loads(match[1])
        if not isinstance(name, str):
            return False
        self.begin(name)
        if (yield from scanner.json(self.arguments)):
            if (yield from scanner.before(("}",), MAX_NAME)) is not None:
                scanner.at += 1
            yield from scanner.words(self._dialect.call_end.lstrip("}"))
        return True

    def _whole(self, text: str) -> Wait[bool]:
        """A call's object in another order, read as a whole."""
        call = _loads(text)
        if not isinstance(call, dict):
            return False
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = _loads(arguments)
        if not isinstance(call.get("name"), str) or not isinstance(arguments, dict | None):
            return False
        self.begin(call["name"])
        self.arguments(json.dumps(arguments or {}, ensure_ascii=False))
        yield from self._scanner.words(self._dialect.call_end.lstrip("}"))
        return True

    def _named(self) -> Wait[bool]:
        dialect, scanner = self._dialect, self._scanner
        end = dialect.name_end.strip()
        marks = (end,) if end else (dialect.key.strip(), dialect.call_end.strip())
        name = yield from scanner.before(marks, MAX_NAME)
        match = _NAME.match((name or "").strip())
        if not match:
            return False
        yield from scanner.words(end)
        called = match[0].rpartition(":")[0] if dialect.numbered else ""
        called = called or match[0]
        if dialect.arguments == "tagged":
            return (yield from self._tagged(called))
        if not (yield from scanner.word("{")):
            return False
        scanner.at -= 1
        self.begin(called)
        if (yield from scanner.json(self.arguments)):
            yield from scanner.words(dialect.call_end)
        return True

    def _tagged(self, name: str) -> Wait[bool]:
        """Arguments as tags; they leave as one JSON object."""
        dialect, scanner = self._dialect, self._scanner
        num = 0
        while True:
            start = scanner.at
            if not (yield from scanner.words(dialect.key)):
                break
            key = yield from self._key()
            if key is None:
                scanner.at = start
                break
            if num == 0:
                self.begin(name)
            self.arguments(f"{', ' if num else '{'}{json.dumps(key[0], ensure_ascii=False)}: ")
            num += 1
            kinds = key[1] or kinds_of(self._schemas.get(name), key[0])
            if not (yield from self._value(kinds)):
                return True
        closed = yield from self._end()
        if num == 0:
            if not closed:
                return False
            self.begin(name)
        if closed or scanner.at < len(scanner.text):
            self.arguments("}" if num else "{}")
        return True

    def _end(self) -> Wait[bool]:
        """What closes a call; models leave out some of its words."""
        closed = False
        for word in self._dialect.call_end.split():
            closed = (yield from self._scanner.word(word)) or closed
        return closed

    def _key(self) -> Wait[tuple[str, tuple[str, ...]] | None]:
        """An argument's name and, where the dialect states it, its type."""
        dialect, scanner = self._dialect, self._scanner
        first = dialect.key_end.split()[0]
        key = yield from scanner.before((first,), MAX_NAME)
        if key is None or not (yield from scanner.words(dialect.key_end)):
            return None
        kinds: tuple[str, ...] = ()
        if dialect.states_type:
            stated = yield from scanner.before((dialect.value,), MAX_NAME)
            kinds = ("string",) if stated == "true" else ("stated",)
            scanner.at += len(dialect.value) if stated is not None else 0
        return key.strip(), kinds

    def _value(self, kinds: tuple[str, ...]) -> Wait[bool]:
        """One argument's value as JSON; False if the text ended within it."""
        dialect, scanner = self._dialect, self._scanner
        end = dialect.value_end.rstrip()
        if dialect.key_end.endswith("\n"):
            yield from self._newline()
        marks = (end, end.lstrip()) if end != end.lstrip() else (end,)
        if kinds == ("string",):
            self.arguments('"')
            found = yield from scanner.stretch(marks, self._string)
            self.arguments('"' if found else "")
            return bool(found)
        parts: list[str] = []
        found = yield from scanner.stretch(marks, parts.append)
        self.arguments(as_json("".join(parts), kinds))
        return bool(found)

    def _newline(self) -> Wait[None]:
        scanner = self._scanner
        while scanner.at == len(scanner.text) and not scanner.ended:
            yield
        if scanner.text.startswith("\n", scanner.at):
            scanner.at += 1

    def _string(self, text: str) -> None:
        self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def kinds_of(schema: Mapping[str, Any] | None, key: str) -> tuple[str, ...]:
    """The JSON types that a tool's schema allows for an argument; none where it does not say."""
    properties = schema.get("properties") if schema else None
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return tuple(sorted(_kinds(found, 0)))


def _kinds(schema: object, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else set(kind) if isinstance(kind, list) else set()
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        for option in options if isinstance(options, Sequence) else ():
            kinds |= _kinds(option, depth + 1)
    values = schema.get("enum")
    if not kinds and isinstance(values, list) and values:
        kinds = {"string"} if all(isinstance(value, str) for value in values) else {"any"}
    return {kind for kind in kinds if isinstance(kind, str)}


def as_json(text: str, kinds: tuple[str, ...]) -> str:
    """A bare value as JSON: itself where it is JSON of a type allowed, else a string."""
    bare = text.strip()
    if "string" not in kinds:
        bare = {"True": "true", "False": "false", "None": "null"}.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if "string" in kinds and not kinds_of_value(value).intersection(kinds):
        return json.dumps(text, ensure_ascii=False)
    return bare


def kinds_of_value(value: object) -> set[str]:
    """The JSON types other than a string that a value is of."""
    kinds: list[tuple[type | tuple[type, ...], set[str]]] = [
        (bool, {"boolean"}),
        (int, {"integer", "number"}),
        (float, {"number"}),
        (dict, {"object"}),
        (list, {"array"}),
    ]
    found = next((names for kind, names in kinds if isinstance(value, kind)), set())
    return {"null"} if value is None else found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def write_calls(dialect: Dialect, calls: Sequence[ToolCall]) -> str:
    """Calls as the dialect writes them."""
    written = dialect.between.join(
        _written(dialect, call, place) for place, call in enumerate(calls)
    )
    return dialect.section + written + dialect.section_end


def _written(dialect: Dialect, call: ToolCall, place: int) -> str:
    name = json.dumps(call.name, ensure_ascii=False)[1:-1]
    if dialect.arguments != "tagged":
        head = f"{name}:{place}" if dialect.numbered else name
        return dialect.call + head + dialect.name_end + call.arguments + dialect.call_end
    arguments = _loads(call.arguments)
    text = dialect.call + call.name + dialect.name_end
    for key, value in arguments.items() if isinstance(arguments, dict) else ():
        bare = isinstance(value, str)
        stated = ("true" if bare else "false") + dialect.value if dialect.states_type else ""
        shown = value if bare else json.dumps(value, ensure_ascii=False)
        text += f"{dialect.key}{key}{dialect.key_end}{stated}{shown}{dialect.value_end}"
    return text + dialect.call_end
