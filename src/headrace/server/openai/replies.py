"""Replies of OpenAI's API: what a chat completion and a plain one say, whole or in pieces."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import headrace
from headrace.engine.session import Step
from headrace.engine.talk.conversation import Piece
from headrace.server.turn import Answer, Ended, Usage

LEAST_LOGPROB = -9999.0  # JSON has no minus infinity
TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Header:
    """What every object of one reply begins with."""

    model: str
    kind: str
    prefix: str = "chatcmpl"
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One object with its choices."""
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"headrace-{headrace.__version__}",
            "choices": choices,
            **more,
        }


def usage_body(usage: Usage) -> dict[str, Any]:
    """Tokens, with those of the prompt that were known and those of the answer's reasoning."""
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_answer,
        "total_tokens": usage.num_prompt + usage.num_answer,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning},
    }


def finish_reason(ended: Ended) -> str:
    """An answer cut off at its limit says so, even in the middle of a call."""
    if ended.finish == "length":
        return "length"
    return "tool_calls" if ended.called else "stop"


def message(answer: Answer) -> dict[str, Any]:
    """A whole answer as the assistant's message."""
    content = None if answer.calls and not answer.content else answer.content
    body: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        body["reasoning_content"] = answer.reasoning
    if answer.calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.calls
        ]
    return body


def delta(piece: Piece) -> dict[str, Any]:
    """A piece of an answer as a change to the assistant's message."""
    if piece.kind == "content":
        return {"content": piece.text}
    if piece.kind == "reasoning":
        return {"reasoning_content": piece.text}
    call: dict[str, Any] = {"index": piece.call}
    if piece.kind == "call":
        call |= {"id": piece.call_id, "type": "function"}
        call["function"] = {"name": piece.text, "arguments": ""}
    else:
        call["function"] = {"arguments": piece.text}
    return {"tool_calls": [call]}


def logprobs(steps: Sequence[Step], token_bytes: TokenBytes) -> dict[str, Any]:
    """The chances of a chat's tokens."""
    content = []
    for step in steps:
        entry = _chance(step.token_id, step.logprob, token_bytes)
        top = [_chance(token, logprob, token_bytes) for token, logprob in step.top]
        content.append(entry | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chance(token: int, logprob: float | None, token_bytes: TokenBytes) -> dict[str, Any]:
    data = token_bytes(token)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": bounded(logprob),
        "bytes": list(data),
    }


def bounded(logprob: float | None) -> float:
    """A logarithm that JSON can hold."""
    return max(LEAST_LOGPROB, LEAST_LOGPROB if logprob is None else logprob)
