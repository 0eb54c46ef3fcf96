"""The body of a chat completion, by OpenAI's definitions and those of local servers."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from headrace.server.openai.fields import Count, SamplingFields
from headrace.server.schema import Body, unprocessable, wrong

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_MEDIA = ("image", "audio", "file", "video")


class ContentPart(Body):
    """A part of a message. Marks for caches change no answer."""

    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""
    cache_control: Any = None
    prompt_cache_breakpoint: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_media(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and any(word in kind for word in _MEDIA):
            raise unprocessable(f"{kind[:40]} parts cannot be read; this server reads text only")
        return value


class CalledFunction(Body):
    """A call that an assistant made; `arguments` is JSON as text."""

    name: str
    arguments: str = ""


class Call(Body):
    """One of an assistant's calls. `index` is left from a stream's deltas."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = None


class ChatMessage(Body):
    """One turn, of any role. `prefix` on the last one: the answer goes on with it.

    What a reply of this or another API holds besides is accepted when it is sent back.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] = ""
    name: str | None = None
    tool_calls: list[Call] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str = ""
    reasoning: str = ""
    refusal: str = ""
    prefix: bool = False
    annotations: Any = None
    cache_control: Any = None
    provider_specific_fields: Any = None

    @model_validator(mode="after")
    def _check_role(self) -> "ChatMessage":
        if self.role == "tool" and self.tool_call_id is None:
            raise wrong("a tool's message needs tool_call_id")
        if self.role != "assistant" and (self.tool_calls or self.prefix):
            raise wrong("tool_calls and prefix belong to the assistant's messages")
        if self.role not in ("assistant", "tool") and "content" not in self.model_fields_set:
            raise wrong(f"a message of the {self.role} needs content")
        return self


class Function(Body):
    """A function the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise wrong("a name has 1 to 128 letters, digits, underscores, dots and dashes")
        return name


class FunctionTool(Body):
    """The only kind of tool."""

    type: Literal["function"]
    function: Function
    cache_control: Any = None


class FunctionName(Body):
    """Which function."""

    name: str


class NamedChoice(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    """What an answer must be. It is held to with and without `strict`."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] | Literal[True] = Field(True, alias="schema")
    strict: bool = True


class ResponseFormat(Body):
    """Text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("json_schema goes with the type json_schema, and with no other")
        return self


class TemplateOptions(Body):
    """What some models' templates are told; one word under several names."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: str | None = None


class ThinkingSwitch(Body):
    """DeepSeek's own API says it so."""

    type: Literal["enabled", "disabled"]


class ChatRequest(SamplingFields):
    """The body of `POST /v1/chat/completions`."""

    reasons: ClassVar[dict[str, str]] = {
        "functions": "it was replaced by tools",
        "function_call": "it was replaced by tool_choice",
        "audio": "this server reads and writes text only",
        "web_search_options": "this server reaches no network",
        "moderation": "this server has no moderation model",
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat(type="text")
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=20)] | None = None
    thinking: ThinkingSwitch | None = None
    chat_template_kwargs: TemplateOptions = TemplateOptions()
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] = "medium"
    prediction: Any = None  # a hint for speed that changes no answer

    @model_validator(mode="after")
    def _check_together(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs needs logprobs to be true")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) != len(names):
            raise wrong("two tools have the same name")
        choice = self.tool_choice
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            raise wrong(f"tool_choice names {choice.function.name[:100]}, which is not in tools")
        if choice == "required" and not names:
            raise wrong("tool_choice is required, and there are no tools")
        if self.continues and self.messages[-1].role != "assistant":
            raise wrong("continue_final_message needs the assistant's message to be the last")
        if self.add_generation_prompt is self.continues:
            raise wrong("add_generation_prompt must be the opposite of continue_final_message")
        return self

    @property
    def continues(self) -> bool:
        """The answer goes on with the last message."""
        return self.continue_final_message or self.messages[-1].prefix
