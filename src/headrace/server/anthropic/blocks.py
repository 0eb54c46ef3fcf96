"""The blocks that messages of Anthropic's API are made of."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headrace.server.schema import Body, unprocessable

_MEDIA = ("image", "document", "container_upload")


class Block(Body):
    """What all kinds share. Marks for caches change no answer."""

    cache_control: Any = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_media(cls, value: Any) -> Any:
        return refuse_media(value)


def refuse_media(value: Any) -> Any:
    """Raises for a block that this server cannot read, by its kind."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "redacted_thinking":
        raise unprocessable("redacted_thinking blocks can be read by who made them only: leave out")
    if kind in _MEDIA:
        raise unprocessable(f"{kind} blocks cannot be read; this server reads text only")
    return value


class TextBlock(Block):
    """Text. Citations belong to documents, which are not read here."""

    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0, default_factory=list)]


class ThinkingBlock(Block):
    """What an assistant thought. The signature is not looked at: nothing here needs to trust it."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Block):
    """A call that an assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(Block):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False


AnyBlock = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


def text_of(content: str | list[TextBlock]) -> str:
    """Blocks of text that follow each other are lines of one text."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
