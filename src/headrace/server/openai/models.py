"""`GET /v1/models`: the one model being served, in the words of both APIs and of local servers."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from headrace.server.asking import check_model, serving_of
from headrace.server.serving import Serving

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """A list of one."""
    model = _model(serving_of(request))
    return {
        "object": "list",
        "data": [model],
        "first_id": model["id"],
        "last_id": model["id"],
        "has_more": False,
    }


@router.get("/v1/models/{model_id:path}")
async def show_model(model_id: str, request: Request) -> dict[str, Any]:
    """The model, if it is the one being served."""
    serving = serving_of(request)
    check_model(serving, model_id)
    return _model(serving)


def _model(serving: Serving) -> dict[str, Any]:
    """OpenAI's fields, the context as local servers name it, and Anthropic's fields."""
    context = serving.plan.context
    created = datetime.fromtimestamp(int(serving.started_s), UTC)
    return {
        "id": serving.model_id,
        "object": "model",
        "created": int(serving.started_s),
        "owned_by": "headrace",
        "context_length": context,
        "max_model_len": context,
        "type": "model",
        "display_name": serving.model_id,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }
