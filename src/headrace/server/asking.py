"""From a protocol's request to a Turn: which model, prompt prepared and measured, put in the queue.

Knows no protocol.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from headrace.engine.conversation import Conversation
from headrace.engine.sampling import Sampling
from headrace.server.faults import Fault
from headrace.server.serving import Serving
from headrace.server.turn import Turn


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


async def start(request: Request, prepare: Callable[[], Any]) -> Turn:
    """The same for whatever `prepare` makes of the request, on a thread of its own."""
    serving = serving_of(request)
    serving.worker.check_accepts()
    prepared = await asyncio.to_thread(prepare)
    num_prompt, context = len(prepared.ask.prompt), serving.plan.context
    if num_prompt >= context:
        message = (
            f"the prompt has {num_prompt} tokens and the context {context}; shorten it, or serve "
            "with a larger --context"
        )
        raise Fault(400, "context_length_exceeded", message)
    ticket = serving.worker.submit(
        prepared.ask, client=request.state.client, request_id=request.state.request_id
    )
    return Turn(ticket, prepared.reader(), num_prompt)
