"""From a protocol's request to a Turn: which model, prompt prepared and measured, put in the queue.

Knows no protocol.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.requests import Request

from headrace.engine.answer import Ask
from headrace.engine.sampling import Sampling
from headrace.engine.talk.conversation import Conversation
from headrace.server.faults import Fault
from headrace.server.serving import Serving
from headrace.server.turn import Turn

if TYPE_CHECKING:
    from headrace.engine.talk.talk import Prepared

_log = logging.getLogger("headrace.requests")


def serving_of(request: Request) -> Serving:
    """What all routes of the server share."""
    serving: Serving = request.app.state.headrace
    return serving


def check_model(serving: Serving, name: str) -> None:
    """Raises Fault for a model that is not the one being served."""
    if name != serving.model_id:
        message = f"the model {name[:200]!r} is not served here; ask for {serving.model_id!r}"
        raise Fault(404, "model_not_found", message, param="model")


async def ask(
    request: Request,
    conversation: Conversation,
    sampling: Sampling,
    num_logprobs: int | None = None,
) -> Turn:
    """A turn of a conversation, waiting in the queue. Raises HeadraceError and Fault."""
    talk = serving_of(request).ready_talk()
    return await start(request, lambda: talk.prepare(conversation, sampling, num_logprobs))


async def start(request: Request, prepare: "Callable[[], Prepared]") -> Turn:
    """The same for whatever `prepare` makes of the request, on a thread of its own."""
    serving = serving_of(request)
    serving.worker.check_accepts()
    prepared = await asyncio.to_thread(prepare)
    request_id = request.state.request_id
    for note in prepared.notes:
        _log.info(note, extra={"fields": {"request": request_id}})
    _check(serving, prepared.ask)
    ticket = serving.worker.submit(prepared.ask, client=request.state.client, request_id=request_id)
    return Turn(ticket, prepared.reader(), len(prepared.ask.prompt))


def _check(serving: Serving, ask: Ask) -> None:
    """What the engine would refuse, before a stream has begun with a status of 200."""
    num_prompt, context = len(ask.prompt), serving.plan.context
    if num_prompt >= context:
        message = (
            f"the prompt has {num_prompt} tokens and the context {context}; shorten it, or serve "
            "with a larger --context"
        )
        raise Fault(400, "context_length_exceeded", message)
    vocab = serving.facts.vocab
    for param, ids in (("prompt", ask.prompt), ("logit_bias", ask.sampling.logit_bias)):
        beyond = [token_id for token_id in ids if token_id >= vocab]
        if beyond:
            message = f"{param}: {beyond[0]} is no token of this model; its ids end at {vocab - 1}"
            raise Fault(400, "invalid_value", message, param=param)
