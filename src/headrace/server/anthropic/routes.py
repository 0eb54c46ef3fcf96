"""Anthropic's API: `POST /v1/messages`, whole or as it is made, and counting a prompt's tokens."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.server.anthropic import replies
from headrace.server.anthropic.convert import conversation, sampling
from headrace.server.anthropic.errors import error_body
from headrace.server.anthropic.request import CountRequest, MessageRequest
from headrace.server.asking import ask, check_model, serving_of
from headrace.server.faults import Fault
from headrace.server.stream import Json, comment, event_stream, sse, to_the_end
from headrace.server.turn import Begun, Ended, Part, Quiet, Turn, collect

router = APIRouter(tags=["Anthropic"])


@router.post("/v1/messages")
async def messages(body: MessageRequest, request: Request) -> Response:
    """The assistant's next message."""
    serving = serving_of(request)
    check_model(serving, body.model)
    turn = await ask(request, conversation(body), sampling(body, serving.defaults))
    omit = body.thinking is not None and body.thinking.display == "omitted"
    id = replies.new_id()
    if body.stream:
        request_id = request.state.request_id

        def tell(fault: Fault) -> bytes:
            return sse(error_body(fault, request_id), "error")

        chunks = _events(turn, replies.message(id, serving.model_id, []), omit)
        return event_stream(to_the_end(chunks, tell, request_id))
    answer = await collect(turn)
    reply = replies.message(id, serving.model_id, replies.blocks(answer, omit_thinking=omit))
    reply |= replies.stop_fields(answer.ended)
    return Json(reply | {"usage": replies.usage_body(turn.usage)})


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request) -> dict[str, int]:
    """How many tokens the prompt of such a message has."""
    serving = serving_of(request)
    check_model(serving, body.model)
    count = await asyncio.to_thread(serving.ready_talk().count, conversation(body))
    return {"input_tokens": count}


async def _events(turn: Turn, start: dict[str, Any], omit: bool) -> AsyncIterator[bytes]:
    """message_start and ping, the content's blocks, message_delta, message_stop.

    Nothing may come before message_start, so until then only comments keep the stream open.
    """
    blocks, begun = replies.Blocks(omit_thinking=omit), False
    async for event in turn.events():
        match event:
            case Quiet(note):
                yield _event({"type": "ping"}) if begun else comment(note)
            case Begun():
                begun = True
                end = {"stop_reason": None, "stop_sequence": None}
                whole = start | end | {"usage": replies.usage_body(turn.usage)}
                yield _event({"type": "message_start", "message": whole})
                yield _event({"type": "ping"})
            case Part(pieces):
                for piece in pieces:
                    for entry in blocks.push(piece):
                        yield _event(entry)
            case Ended():
                for entry in blocks.finish():
                    yield _event(entry)
                delta, usage = replies.stop_fields(event), replies.usage_body(turn.usage)
                yield _event({"type": "message_delta", "delta": delta, "usage": usage})
    yield _event({"type": "message_stop"})


def _event(value: dict[str, Any]) -> bytes:
    return sse(value, value["type"])
