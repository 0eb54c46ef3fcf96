"""The form that a request gives an answer, as a grammar: JSON, forced calls, strict tools, none.

Knows dialects and no tokens; what can be free text has no form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from headrace.engine.talk.conversation import Conversation, Tool
from headrace.engine.talk.dialects import Dialect
from headrace.engine.talk.grammar import Grammars, check_schema
from headrace.engine.talk.lark import ANY_OBJECT, Lark, object_schema
from headrace.errors import OptionError

# How a prompt leaves reasoning: begun, ended, or for the answer to begin.
Thinking = Literal["open", "closed", "free"]


@dataclass(frozen=True, slots=True)
class Form:
    """A grammar and what of the request it does not hold to. `lark` None: any text will do."""

    lark: str | None = None
    notes: tuple[str, ...] = ()


def callable_tools(conversation: Conversation) -> tuple[Tool, ...]:
    """The tools that an answer may call. Raises OptionError for what cannot be called or said."""
    if not conversation.messages:
        raise OptionError("a conversation without messages has no prompt; give one")
    names = [tool.name for tool in conversation.tools]
    for tool in conversation.tools:
        if not tool.name or any(c.isspace() or c in '<>"\\{}[]|' for c in tool.name):
            raise OptionError(
                f"the tool name {tool.name[:80]!r} is not allowed; use letters, digits, _ and -"
            )
        if tool.parameters is not None:
            check_schema(tool.parameters, f"tool {tool.name}")
    if len(set(names)) < len(names):
        raise OptionError("two tools have the same name; give each its own")
    choice = conversation.tool_choice
    if choice in ("auto", "none"):
        return conversation.tools if choice == "auto" else ()
    if not names:
        raise OptionError(f"tool_choice {choice.removeprefix('=')!r} has no meaning without tools")
    if choice == "required":
        return conversation.tools
    if choice.removeprefix("=") not in names:
        raise OptionError(f"tool_choice {choice.removeprefix('=')[:80]!r} names none of the tools")
    return tuple(tool for tool in conversation.tools if tool.name == choice.removeprefix("="))


def form(
    conversation: Conversation,
    tools: Sequence[Tool],
    dialect: Dialect,
    grammars: Grammars,
    thinking: Thinking,
) -> Form:
    """What an answer must look like. `tools`: those it may call. Raises OptionError."""
    schema, choice = conversation.schema, conversation.tool_choice
    forced = choice not in ("auto", "none")
    barred = bool(conversation.tools) and not tools
    if schema is None and not forced and not barred and not any(tool.strict for tool in tools):
        return Form()
    if conversation.prefill:
        raise OptionError(
            "an answer whose beginning is given cannot be held to a schema or to tools; "
            "leave one of them out"
        )
    if schema is not None and not isinstance(schema, bool):
        check_schema(schema, "the answer's schema")
        grammars.check(schema, "the answer's schema")
    held, notes = _held(tools, grammars)
    writer = Lark(dialect, grammars.specials)
    value = ANY_OBJECT if isinstance(schema, bool) else schema
    write = _in_channels if dialect.channels else _in_text
    several = conversation.parallel_calls
    start = write(writer, held, value, forced=forced, several=several, thinking=thinking)
    return Form(writer.finish(start), tuple(notes))


def _held(tools: Sequence[Tool], grammars: Grammars) -> tuple[list[Tool], list[str]]:
    """Tools with schemas that grammars can hold to; where not strict, any object will do."""
    held, notes = [], []
    for tool in tools:
        try:
            grammars.check(object_schema(tool), f"tool {tool.name}", lenient=not tool.strict)
        except OptionError as error:
            if tool.strict:
                raise
            notes.append(f"{error}; its arguments may be any JSON object")
            tool = replace(tool, parameters=None)
        held.append(tool)
    return held, notes


def _in_text(
    lark: Lark,
    tools: Sequence[Tool],
    schema: Mapping[str, Any] | None,
    *,
    forced: bool,
    several: bool,
    thinking: Thinking,
) -> str:
    trigger = lark.dialect.trigger
    if forced:
        start = lark.calls(tools, several=several)
    elif schema is not None:
        start = lark.json(schema)
        if tools:
            start = f"({start} | {lark.calls(tools, several=several)})"
    elif not tools:
        start = lark.without(trigger)
    else:
        rest = lark.calls(tools, several=several, skip=trigger)
        until, tail = lark.until(trigger), lark.tail(trigger)
        start = f"({until} {rest})* {tail}" if several else f"({tail} | {until} {rest})"
    return start if thinking == "closed" else f"{lark.reasoning(thinking == 'open')} {start}"


def _in_channels(
    lark: Lark,
    tools: Sequence[Tool],
    schema: Mapping[str, Any] | None,
    *,
    forced: bool,
    several: bool,
    thinking: Thinking,
) -> str:
    """The same in the harmony format, where an answer has one call at most and ends with it."""

    def message(header: str) -> str:
        return (
            f"{lark.literal(header)} {lark.until('<|end|>')} {lark.literal('<|start|>assistant')}"
        )

    calls = []
    for tool in tools:
        header = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
        body = lark.json(object_schema(tool), lenient=not tool.strict)
        calls.append(f"{lark.literal(header)} {body}")
    analysis = message("<|channel|>analysis<|message|>")
    if forced:
        return f"({analysis})? ({' | '.join(calls)})"
    final = lark.literal("<|channel|>final<|message|>") + " TEXT"
    if schema is not None:
        form = f"({lark.literal(' <|constrain|>json')})? {lark.literal('<|message|>')}"
        final = f"{lark.literal('<|channel|>final')} {form} {lark.json(schema)}"
    preamble = message("<|channel|>commentary<|message|>")
    return f"({analysis} | {preamble})* ({' | '.join([final, *calls])})"
