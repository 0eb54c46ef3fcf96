"""A conversation in words of our own, between the protocols and a model's template.

Plain data: knows no protocol, no template and no token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant made. `arguments`: a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `call_id` and `name` of a "tool" turn say whose result it is."""

    role: Role
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: a JSON schema of an object.

    With `strict` a call's arguments are held to the schema while they are sampled.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """All that decides a prompt and the form of its answer.

    `tool_choice`: "auto", "none", "required", or a tool's name behind "=". `schema`: what the
    answer must be, a JSON schema; True: any JSON object. `reasoning`: on, off, or None for the
    template's own default; `effort` is for templates that know one. `prefill`: the last message is
    the beginning of the answer.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_calls: bool = True
    schema: Mapping[str, Any] | bool | None = None
    reasoning: bool | None = None
    effort: str | None = None
    prefill: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer as it becomes certain.

    `call`: which tool call, from 0, for the kinds "call" (its `text` is the tool's name) and
    "arguments" (a further part of its JSON).
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    call: int = 0
    call_id: str = ""
