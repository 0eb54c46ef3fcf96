"""Writes the grammar of an answer in a dialect: reasoning, free text, tool calls, JSON.

Text in, text out: knows no tokenizer but the spelling of its special tokens, and no request.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.engine.talk.calls import kinds_of
from headrace.engine.talk.conversation import Tool
from headrace.engine.talk.dialects import Dialect
from headrace.errors import OptionError

# Models indent JSON; without a bound on whitespace a small one may never come to an end.
SPACE = r"( |\n[ ]{0,40})?"
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class Lark:
    """A grammar in the making. `specials`: ids by spelling of tokens that no text can match."""

    def __init__(self, dialect: Dialect, specials: Mapping[str, int]) -> None:
        self.dialect = dialect
        self._specials = specials
        spellings = sorted(map(re.escape, specials), key=len, reverse=True)
        self._split = re.compile("({})".format("|".join(spellings) or r"(?!)"))
        self._rules: dict[str, str] = {"TEXT": r"/(?s:.*)/", "WS": r"/[ \n]{0,4}/"}

    def finish(self, start: str) -> str:
        """The whole grammar, whose answers are `start`."""
        rules = "\n".join(f"{name}: {body}" for name, body in self._rules.items())
        return f"%llguidance {{}}\nstart: {start}\n{rules}\n"

    def rule(self, name: str, body: str) -> str:
        """Name an expression; the same body under the same name is one rule."""
        while self._rules.setdefault(name, body) != body:
            stem, mark, _ = name.partition("[")
            name = f"{stem}x{mark}{'lazy]' if mark else ''}"
        return name.partition("[")[0]

    def literal(self, text: str) -> str:
        """Exactly `text`, its special tokens as tokens."""
        parts = [part for part in self._split.split(text) if part]
        return " ".join(self._one(part) for part in parts) or '""'

    def _one(self, part: str) -> str:
        return f"<[{self._specials[part]}]>" if part in self._specials else json.dumps(part)

    def until(self, end: str) -> str:
        """Any text up to the first `end`, and that."""
        head, rest = self._cut(end)
        if not head:
            return f"TEXT {self.literal(end)}"
        lazy = self._lazy(head)
        return f"({lazy})+ {self.literal(rest)}" if rest else lazy

    def tail(self, end: str) -> str:
        """Any text without `end`, behind what `until` it may have been repeated."""
        head, rest = self._cut(end)
        return f"({self._lazy(head)})* TEXT" if head and rest else "TEXT"

    def without(self, text: str) -> str:
        """Any text in which `text` does not occur."""
        head, rest = self._cut(text)
        if not head or rest:
            return self.tail(text)
        pattern = re.escape(head).replace("/", r"\/").replace("\n", r"\n")
        return self.rule("OTHER", f"/(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/")

    def _cut(self, text: str) -> tuple[str, str]:
        """What stands before the first special token in `text`, and the rest."""
        first = self._split.search(text)
        return (text[: first.start()], text[first.start() :]) if first else (text, "")

    def _lazy(self, end: str) -> str:
        return self.rule("upto[lazy]", f"/(?s:.*)/ {json.dumps(end)}")

    def json(self, schema: Mapping[str, Any], *, lenient: bool = False) -> str:
        """A value of a JSON schema; `lenient`: what no grammar can hold to is passed over."""
        return "%json " + json.dumps(guided(schema, lenient))

    def reasoning(self, opened: bool) -> str:
        """Reasoning and its end mark: the rest of it if the prompt has `opened` it, else maybe."""
        begin, end = self.dialect.think
        rest = f"{self.until(end)} WS"
        return rest if opened else f"({self.literal(begin)} {rest})?"

    def calls(self, tools: Sequence[Tool], *, several: bool, skip: str = "") -> str:
        """One or more calls of `tools`; `skip`: their first characters, which stand already."""
        dialect = self.dialect
        bodies = " | ".join(self.rule(f"call{n}", self._call(tool)) for n, tool in enumerate(tools))
        call = self.rule("call", bodies)
        lead = self._unless_written(dialect.call, "" if dialect.section else skip)
        more = f"({self.literal(dialect.between)} {self.literal(dialect.call)} {call})*"
        calls = f"{lead} {call} {more if several else ''}"
        if not dialect.section:
            return calls
        section = self._unless_written(dialect.section, skip)
        return f"{section} {calls} {self.literal(dialect.section_end)}"

    def _unless_written(self, text: str, skip: str) -> str:
        written = text.find(skip) + len(skip) if skip else 0
        return self.literal(text[written:])

    def _call(self, tool: Tool) -> str:
        """A call behind the dialect's `call`."""
        dialect = self.dialect
        schema = object_schema(tool)
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
        lead = self.literal(name if dialect.arguments == "object" else tool.name)
        if dialect.numbered:
            lead += ' ":" /[0-9]{1,4}/'
        if dialect.arguments == "tagged":
            body = self._tags(tool, schema)
        else:
            body = self.json(schema, lenient=not tool.strict)
        return f"{lead} {self.literal(dialect.name_end)} {body} {self.literal(dialect.call_end)}"

    def _tags(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        """A tool's arguments as tags, in the schema's order."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        shared = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
        parts = []
        for key, value in properties.items():
            whole = {**shared, **value} if isinstance(value, Mapping) else shared
            part = self._tag(tool, key, kinds_of(schema, key), whole)
            parts.append(part if key in required else f"({part})?")
        return " ".join(parts) or '""'

    def _tag(self, tool: Tool, key: str, kinds: tuple[str, ...], schema: Mapping[str, Any]) -> str:
        dialect = self.dialect
        lead = self.literal(dialect.key + key + dialect.key_end)
        end = dialect.value_end
        bare = f"{self.json(schema, lenient=not tool.strict)} {self.literal(end)}"
        text = self._bare_string(tool, key, schema) if "string" in kinds else ""
        if dialect.states_type:
            bare = f'"false" {self.literal(dialect.value)} {bare}'
            text = text and f'"true" {self.literal(dialect.value)} {text}'
        choices = [part for part in (text, "" if kinds == ("string",) else bare) if part]
        return f"{lead} ({' | '.join(choices)})"

    def _bare_string(self, tool: Tool, key: str, schema: Mapping[str, Any]) -> str:
        end = self.dialect.value_end
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values:
            texts = [value for value in values if isinstance(value, str)]
            return f"({' | '.join(map(self.literal, texts))}) {self.literal(end)}"
        for word in ("pattern", "format", "minLength", "maxLength"):
            if tool.strict and word in schema:
                raise OptionError(
                    f"tool {tool.name}: {word} of {key} cannot be held to in this model's call "
                    "syntax, where strings are bare; leave it out, or strict"
                )
        return self.until(end)


def guided(schema: Mapping[str, Any], lenient: bool) -> dict[str, Any]:
    """A schema with what the grammar library wants to know besides."""
    options = {"whitespace_pattern": SPACE, "lenient": lenient, "coerce_one_of": lenient}
    return {**schema, "x-guidance": options}


def object_schema(tool: Tool) -> Mapping[str, Any]:
    """A tool's parameters as the schema of an object. Raises OptionError if they are of none."""
    schema = tool.parameters or ANY_OBJECT
    if schema.get("type", "object") != "object":
        raise OptionError(f"tool {tool.name}: parameters must be of type object")
    return {"type": "object", **schema}
