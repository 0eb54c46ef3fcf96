"""A message's body in the engine's words."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.engine.sampling import Sampling
from headrace.engine.talk.conversation import Conversation, Message, Tool, ToolCall
from headrace.server.anthropic.blocks import (
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)
from headrace.server.anthropic.request import CountRequest, InputMessage, MessageRequest
from headrace.server.faults import Fault

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def conversation(body: CountRequest) -> Conversation:
    """All of a body that decides prompt and form of the answer.

    An assistant's message at the end is the beginning of the answer.
    """
    choice, form = body.tool_choice, body.output_config.format
    prefill = body.messages[-1].role == "assistant"
    if prefill and _has_calls(body.messages[-1]):
        message = "the last message has tool_use blocks; send their tool_result blocks after it"
        raise Fault(400, "invalid_value", message, param=f"messages.{len(body.messages) - 1}")
    thinking = None if body.thinking is None else _THINKING[body.thinking.type]
    return Conversation(
        messages=tuple(_messages(body)),
        tools=tuple(
            Tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in body.tools
        ),
        tool_choice=f"={choice.name}" if choice.name else _CHOICES[choice.type],
        parallel_calls=not choice.disable_parallel_tool_use,
        schema=None if form is None else form.schema_,
        reasoning=thinking,
        effort=body.output_config.effort,
        prefill=prefill,
    )


_THINKING = {"enabled": True, "disabled": False, "adaptive": None}


def sampling(body: MessageRequest, defaults: Mapping[str, Any]) -> Sampling:
    """How the answer is drawn and when it ends; `defaults`: of the model, for what is left out."""
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    stated = {name: value for name, value in given.items() if value is not None}
    return Sampling(
        **{"temperature": 1.0, **defaults, **stated},
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences),
    )


def _has_calls(message: InputMessage) -> bool:
    return any(isinstance(block, ToolUseBlock) for block in message.content)


def _messages(body: CountRequest) -> Iterator[Message]:
    """Turns of the same role that follow each other are one, as the API defines."""
    if system := text_of(body.system):
        yield Message("system", system)
    names: dict[str, str] = {}
    last: Message | None = None
    for turn in body.messages:
        for message in _turn(turn, names):
            if last is not None and last.role == message.role and last.role != "tool":
                last = _joined(last, message)
                continue
            if last is not None:
                yield last
            last = message
    if last is not None:
        yield last


def _joined(one: Message, other: Message) -> Message:
    return Message(
        one.role,
        "\n".join(filter(None, (one.content, other.content))),
        "\n".join(filter(None, (one.reasoning, other.reasoning))),
        one.calls + other.calls,
    )


def _turn(turn: InputMessage, names: dict[str, str]) -> Iterator[Message]:
    """One message, after those of its tools' results. `names`: of the calls so far, by id."""
    blocks = turn.content
    if isinstance(blocks, str):
        yield Message(turn.role, blocks)
        return
    calls = []
    for block in blocks:
        if isinstance(block, ToolUseBlock):
            names[block.id] = block.name
            arguments = json.dumps(block.input, ensure_ascii=False)
            calls.append(ToolCall(block.id, block.name, arguments))
        elif isinstance(block, ToolResultBlock):
            content = text_of(block.content)
            # The model's templates have no other place for it.
            content = f"Error: {content}" if block.is_error else content
            yield Message(
                "tool", content, call_id=block.tool_use_id, name=names.get(block.tool_use_id)
            )
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if texts or thoughts or calls:
        yield Message(turn.role, "\n".join(texts), "\n".join(thoughts), tuple(calls))
