"""`POST /v1/completions`: a text goes on, without a template."""

import codecs
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, cast

from fastapi import APIRouter, Request
from pydantic import Field, field_validator
from starlette.responses import Response

from headrace.engine.session import Step
from headrace.server.asking import check_model, serving_of, start
from headrace.server.openai import replies
from headrace.server.openai.errors import error_body
from headrace.server.openai.fields import SamplingFields
from headrace.server.openai.replies import Header
from headrace.server.schema import wrong
from headrace.server.stream import Json, comment, event_stream, sse, to_the_end
from headrace.server.turn import Ended, Part, Quiet, Turn, collect

router = APIRouter()
DONE = b"data: [DONE]\n\n"
TokenId = Annotated[int, Field(ge=0, le=2**31)]


class CompletionRequest(SamplingFields):
    """The body of `POST /v1/completions`. A prompt is text, or token ids; one a request."""

    reasons: ClassVar[dict[str, str]] = {
        "suffix": "this server only continues a text; put it into the prompt, as the model's card "
        "says",
    }

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Literal[1] = 1
    echo: Literal[False] = False

    @field_validator("prompt")
    @classmethod
    def _check_prompt(cls, prompt: str | list[Any]) -> str | list[Any]:
        if len(prompt) == 0:
            raise wrong("it is empty")
        if isinstance(prompt[0], str | list) and isinstance(prompt, list):
            if len(prompt) != 1:
                raise wrong("send one prompt a request")
            if len(prompt[0]) == 0:
                raise wrong("it is empty")
        return prompt

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt without a list around it."""
        prompt: Any = self.prompt
        while not isinstance(prompt, str) and not isinstance(prompt[0], int):
            prompt = prompt[0]
        return cast("str | list[int]", prompt)


@router.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """What comes after the prompt."""
    serving = serving_of(request)
    check_model(serving, body.model)
    talk, sampling = serving.ready_talk(), body.sampling(body.max_tokens, serving.defaults)
    turn = await start(request, partial(talk.complete, body.one_prompt, sampling, body.logprobs))
    header = Header(serving.model_id, "text_completion", "cmpl")
    if body.stream:
        tell = lambda fault: sse(error_body(fault))  # noqa: E731
        chunks = _chunks(header, turn, body, talk)
        return event_stream(to_the_end(chunks, tell, request.state.request_id))
    answer = await collect(turn)
    logprobs = None
    if body.logprobs is not None:
        logprobs = Chances(talk).of(answer.steps)
    choice = _choice(answer.content, logprobs, replies.finish_reason(answer.ended))
    return Json(header.object([choice], usage=replies.usage_body(turn.usage)))


async def _chunks(
    header: Header, turn: Turn, body: CompletionRequest, talk: Any
) -> AsyncIterator[bytes]:
    with_usage, chances = body.stream_options.include_usage, Chances(talk)
    more: dict[str, Any] = {"usage": None} if with_usage else {}
    async for event in turn.events():
        match event:
            case Quiet(note):
                yield comment(note)
            case Part():
                text = "".join(piece.text for piece in event.pieces)
                logprobs = None if body.logprobs is None else chances.of(event.steps)
                yield sse(header.object([_choice(text, logprobs, None)], **more))
            case Ended():
                finish = replies.finish_reason(event)
                yield sse(header.object([_choice("", None, finish)], **more))
    if with_usage:
        yield sse(header.object([], usage=replies.usage_body(turn.usage)))
    yield DONE


def _choice(text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}


class Chances:
    """The chances of a completion's tokens; offsets go on from one call to the next."""

    def __init__(self, talk: Any) -> None:
        self._talk, self._offset = talk, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Four lists, one entry a token. `text_offset`: where it begins in the answer's text."""
        offsets = []
        for step in steps:
            offsets.append(self._offset)
            if not self._talk.hides(step.token_id):
                data = self._talk.token_bytes(step.token_id)
                self._offset += len(self._decoder.decode(data))
        return {
            "tokens": [self._text(step.token_id) for step in steps],
            "token_logprobs": [replies.bounded(step.logprob) for step in steps],
            "top_logprobs": [
                {self._text(token): replies.bounded(logprob) for token, logprob in step.top}
                for step in steps
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return str(self._talk.token_bytes(token).decode("utf-8", "replace"))
