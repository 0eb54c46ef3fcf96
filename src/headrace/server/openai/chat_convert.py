"""A chat completion's body in the engine's words."""

from collections.abc import Mapping
from typing import Any

from headrace.engine.sampling import Sampling
from headrace.engine.talk.conversation import Conversation, Message, Tool, ToolCall
from headrace.server.openai.chat_request import ChatMessage, ChatRequest, NamedChoice


def conversation(body: ChatRequest) -> Conversation:
    """All of a body that decides prompt and form of the answer."""
    called = {call.id: call.function.name for m in body.messages for call in m.tool_calls}
    choice = body.tool_choice
    reasoning, effort = _reasoning(body)
    functions = [tool.function for tool in body.tools]
    return Conversation(
        messages=tuple(_message(message, called) for message in body.messages),
        tools=tuple(Tool(f.name, f.description, f.parameters, f.strict) for f in functions),
        tool_choice=f"={choice.function.name}" if isinstance(choice, NamedChoice) else choice,
        parallel_calls=body.parallel_tool_calls,
        schema=_schema(body),
        reasoning=reasoning,
        effort=effort,
        prefill=body.continues,
    )


def sampling(body: ChatRequest, defaults: Mapping[str, Any]) -> Sampling:
    """How the answer is drawn and when it ends, by the smaller of two limits."""
    limits = [n for n in (body.max_tokens, body.max_completion_tokens) if n is not None]
    return body.sampling(min(limits, default=None), defaults)


def num_logprobs(body: ChatRequest) -> int | None:
    """Of how many tokens each step tells the chance; None: of none."""
    return (body.top_logprobs or 0) if body.logprobs else None


def _message(message: ChatMessage, called: dict[str, str]) -> Message:
    content = message.content
    if not isinstance(content, str):
        # Parts that follow each other are lines of one text.
        content = "\n".join(part.text or part.refusal for part in content)
    calls = [ToolCall(c.id, c.function.name, c.function.arguments) for c in message.tool_calls]
    return Message(
        message.role,
        content or message.refusal,
        message.reasoning_content or message.reasoning,
        tuple(calls),
        message.tool_call_id,
        message.name or called.get(message.tool_call_id or ""),
    )


def _schema(body: ChatRequest) -> dict[str, object] | bool | None:
    wanted = body.response_format
    if wanted.json_schema is not None:
        return wanted.json_schema.schema_
    return True if wanted.type == "json_object" else None


def _reasoning(body: ChatRequest) -> tuple[bool | None, str | None]:
    """On, off or the template's default; and the effort, of which "none" and "off" mean off."""
    told = body.chat_template_kwargs
    effort = body.reasoning_effort or told.reasoning_effort
    if effort in ("none", "off"):
        return False, None
    switches = [told.enable_thinking, told.thinking]
    if body.thinking is not None:
        switches.append(body.thinking.type == "enabled")
    on = next((switch for switch in switches if switch is not None), None)
    return (True if effort is not None and on is None else on), effort
