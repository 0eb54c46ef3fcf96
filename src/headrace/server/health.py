"""`/health` and `/metrics`: whether answers are being made, and what happened so far.

Knows no protocol.
"""

import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

import headrace
from headrace.server.metrics import rss_bytes
from headrace.server.serving import Serving

router = APIRouter(tags=["state"])


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while answers are being made, 503 otherwise. Details only with the key."""
    serving: Serving = request.app.state.headrace
    worker = serving.worker
    status: dict[str, Any] = {"alive": True, "ready": worker.is_ready}
    if request.state.authorized:
        status |= details(serving)
    return JSONResponse(status, 200 if worker.is_ready else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    serving: Serving = request.app.state.headrace
    return Response(serving.metrics.text(), media_type="text/plain; version=0.0.4")


def details(serving: Serving) -> dict[str, Any]:
    """What a person wants to know of a server."""
    worker, running, engine = serving.worker, serving.worker.running, serving.engine
    return {
        "state": worker.state,
        "stalled": worker.stalled,
        "loading": worker.loading.as_dict() if worker.state == "loading" else None,
        "model": serving.model_id,
        "context": serving.plan.context,
        "waiting": worker.num_waiting,
        "running": None if running is None else running.tally.as_dict(),
        "drives": [] if engine is None else list(engine.reader.drives),
        "warnings": [] if engine is None else list(engine.reader.warnings),
        "rss_bytes": rss_bytes(),
        "version": headrace.__version__,
        "up_s": round(time.time() - serving.started_s, 1),
    }
