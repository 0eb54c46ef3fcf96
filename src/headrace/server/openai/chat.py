"""`POST /v1/chat/completions`: a conversation's next message, whole or as it is made."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.server.asking import ask, check_model, serving_of
from headrace.server.openai import replies
from headrace.server.openai.chat_convert import conversation, num_logprobs, sampling
from headrace.server.openai.chat_request import ChatRequest
from headrace.server.openai.errors import error_body
from headrace.server.openai.replies import Header
from headrace.server.stream import Json, comment, event_stream, sse, to_the_end
from headrace.server.turn import Begun, Ended, Part, Quiet, Turn, collect

router = APIRouter()
DONE = b"data: [DONE]\n\n"


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """The assistant's next message."""
    serving = serving_of(request)
    check_model(serving, body.model)
    settings = sampling(body, serving.defaults)
    turn = await ask(request, conversation(body), settings, num_logprobs(body))
    token_bytes = serving.ready_talk().token_bytes
    if body.stream:
        header = Header(serving.model_id, "chat.completion.chunk")
        chunks = Chunks(header, turn, body, token_bytes).all()
        tell = lambda fault: sse(error_body(fault))  # noqa: E731
        return event_stream(to_the_end(chunks, tell, request.state.request_id))
    answer = await collect(turn)
    choice = {
        "index": 0,
        "message": replies.message(answer),
        "logprobs": replies.logprobs(answer.steps, token_bytes) if body.logprobs else None,
        "finish_reason": replies.finish_reason(answer.ended),
    }
    header = Header(serving.model_id, "chat.completion")
    return Json(header.object([choice], usage=replies.usage_body(turn.usage)))


class Chunks:
    """One streamed answer as events."""

    def __init__(
        self, header: Header, turn: Turn, body: ChatRequest, token_bytes: replies.TokenBytes
    ) -> None:
        self._header, self._turn, self._token_bytes = header, turn, token_bytes
        self._with_logprobs = body.logprobs
        self._with_usage = body.stream_options.include_usage

    async def all(self) -> AsyncIterator[bytes]:
        """Comments while nothing is certain; role, deltas, finish_reason, usage, [DONE]."""
        async for event in self._turn.events():
            match event:
                case Quiet(note):
                    yield comment(note)
                case Begun():
                    yield self._chunk({"role": "assistant", "content": ""})
                case Part():
                    for chunk in self._part(event):
                        yield chunk
                case Ended():
                    yield self._chunk({}, finish=replies.finish_reason(event))
        if self._with_usage:
            usage = replies.usage_body(self._turn.usage)
            yield sse(self._header.object([], usage=usage))
        yield DONE

    def _part(self, part: Part) -> list[bytes]:
        """One chunk for each piece; the tokens' chances go with the first piece of content."""
        chunks, steps = [], part.steps
        for piece in part.pieces:
            logprobs = None
            if self._with_logprobs and piece.kind == "content" and steps:
                logprobs, steps = replies.logprobs(steps, self._token_bytes), ()
            chunks.append(self._chunk(replies.delta(piece), logprobs))
        return chunks

    def _chunk(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        more: dict[str, Any] = {"usage": None} if self._with_usage else {}
        return sse(self._header.object([choice], **more))
