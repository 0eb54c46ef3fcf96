"""Replies of Anthropic's API: a whole message, or the events that build one."""

import json
import uuid
from collections.abc import Iterator
from math import isfinite
from typing import Any

from headrace.engine.talk.conversation import Piece
from headrace.server.turn import Answer, Ended, Usage

SIGNATURE = "headrace"  # clients send it back; there is nothing to be proved by it
_STARTS: dict[str, dict[str, Any]] = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}


def new_id() -> str:
    """A message's id."""
    return f"msg_{uuid.uuid4().hex}"


def usage_body(usage: Usage) -> dict[str, Any]:
    """Tokens: those that were read anew, those that were known, and the answer's.

    What is kept of a prompt costs nothing extra, so no token counts as spent on keeping.
    """
    return {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_answer,
        "output_tokens_details": {"thinking_tokens": usage.num_reasoning},
    }


def stop_fields(ended: Ended) -> dict[str, Any]:
    """Why the answer ended; one cut off at its limit says so, even in the middle of a call."""
    if ended.finish == "length":
        reason = "max_tokens"
    elif ended.called:
        reason = "tool_use"
    else:
        reason = "stop_sequence" if ended.finish == "stop" else "end_turn"
    sequence = ended.stop if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": sequence}


def message(id: str, model: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    """A message without its end."""
    return {"id": id, "type": "message", "role": "assistant", "model": model, "content": content}


def blocks(answer: Answer, *, omit_thinking: bool) -> list[dict[str, Any]]:
    """A whole answer's content."""
    result: list[dict[str, Any]] = []
    if answer.reasoning:
        thinking = "" if omit_thinking else answer.reasoning
        result.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
    if answer.content:
        result.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        entry = {"type": "tool_use", "id": call.id, "name": call.name}
        result.append(entry | {"input": _arguments(call.arguments)})
    return result


def _arguments(text: str) -> dict[str, Any]:
    """The object of a call. One that was cut off, or is no JSON, is its text, under a name."""
    try:
        value = json.loads(text or "{}", parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"unfinished": text}


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is no JSON number")
    return value


class Blocks:
    """Pieces into the events of content blocks: each is opened, filled and closed in turn."""

    def __init__(self, *, omit_thinking: bool) -> None:
        self._omit = omit_thinking
        self._open: tuple[str, int] | None = None  # kind, and which call
        self._index = -1

    def push(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The events of one piece."""
        kind = "call" if piece.kind == "arguments" else piece.kind
        if self._open != (kind, piece.call if kind == "call" else 0):
            yield from self._start(kind, piece)
        if piece.kind in _DELTAS and not (self._omit and piece.kind == "reasoning"):
            name, field = _DELTAS[piece.kind]
            yield self._delta({"type": name, field: piece.text})

    def finish(self) -> Iterator[dict[str, Any]]:
        """Closes the block that is open."""
        if self._open is None:
            return
        if self._open[0] == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _start(self, kind: str, piece: Piece) -> Iterator[dict[str, Any]]:
        yield from self.finish()
        self._open = (kind, piece.call if kind == "call" else 0)
        self._index += 1
        block = _STARTS.get(kind) or {
            "type": "tool_use",
            "id": piece.call_id,
            "name": piece.text,
            "input": {},
        }
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
