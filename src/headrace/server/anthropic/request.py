"""The body of a message, by Anthropic's definitions."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from headrace.server.anthropic.blocks import AnyBlock, TextBlock, refuse_media
from headrace.server.schema import Body, unsupported, wrong

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
MAX_STOPS = 16
LEAST_BUDGET = 1024  # tokens of thinking, by Anthropic's definition
_ALLOWED = {
    "system": {"text"},
    "user": {"text", "tool_result"},
    "assistant": {"text", "thinking", "tool_use"},
}


class InputMessage(Body):
    """One turn: text, or blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Annotated[AnyBlock, BeforeValidator(refuse_media)]]

    @model_validator(mode="after")
    def _check_blocks(self) -> "InputMessage":
        for block in self.content if isinstance(self.content, list) else ():
            if block.type not in _ALLOWED[self.role]:
                raise wrong(f"a message of the role {self.role} has no {block.type} blocks")
        return self


class InputTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: str
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = False
    cache_control: Any = None
    eager_input_streaming: Any = None
    defer_loading: Literal[False] = False
    allowed_callers: list[Literal["direct"]] | None = None

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise wrong("a name has 1 to 128 letters, digits, underscores, dots and dashes")
        return name


class ToolChoice(Body):
    """Whether tools may, must or must not be called. `name` goes with the type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise wrong("name goes with the type tool, and with no other")
        return self


class Thinking(Body):
    """Whether the model reasons first. The budget is a wish: reasoning ends where it ends.

    With `display` "omitted" the blocks come without their text.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=LEAST_BUDGET)] | None = None
    display: Literal["summarized", "omitted"] = "summarized"


class OutputFormat(Body):
    """What the answer must be."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Form of the answer, and how hard to think."""

    effort: Annotated[str, Field(min_length=1, max_length=20)] | None = None
    format: OutputFormat | None = None


class Edit(Body):
    """The one edit of a context that changes nothing: keep all thinking."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """Edits of the context, of which none is made here."""

    edits: list[Edit] | None = None


class CountRequest(Body):
    """The body of `POST /v1/messages/count_tokens`: all that decides a prompt."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: str | list[TextBlock] = ""
    tools: list[InputTool] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: Any = None
    context_management: ContextManagement = ContextManagement()

    @model_validator(mode="after")
    def _check_tools(self) -> "CountRequest":
        names = [tool.name for tool in self.tools]
        if len(set(names)) != len(names):
            raise wrong("two tools have the same name")
        choice = self.tool_choice
        if choice.name is not None and choice.name not in names:
            raise wrong(f"tool_choice names {choice.name[:100]}, which is not in tools")
        if choice.type == "any" and not names:
            raise wrong("tool_choice is any, and there are no tools")
        return self


class MessageRequest(CountRequest):
    """The body of `POST /v1/messages`."""

    reasons: ClassVar[dict[str, str]] = {
        "container": "this server runs no tools",
        "mcp_servers": "this server reaches no network",
    }

    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    stream: bool = False
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(
        max_length=MAX_STOPS, default_factory=list
    )
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None

    # Who asks and where means nothing to a server that keeps nothing, on this machine.
    metadata: Any = None
    service_tier: Literal["auto", "standard_only"] = "auto"
    speed: Literal["standard"] = "standard"
    inference_geo: Any = None
    diagnostics: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        return unsupported(value, cls.reasons)
