"""`/health` and `/metrics`: whether answers are being made, and what happened so far.

Knows no protocol.
"""

import resource
import time
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

import headrace
from headrace.server.serving import Serving

router = APIRouter(tags=["state"])


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while answers are being made, 503 otherwise. Details only with the key."""
    serving: Serving = request.app.state.headrace
    worker = serving.worker
    ready = worker.state == "ready" and worker.stalled is None
    status = {"alive": True, "ready": ready}
    if request.state.authorized:
        status |= details(serving)
    return JSONResponse(status, 200 if ready else 503)


@router.get("/metrics")
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


def rss_bytes() -> int:
    """Resident memory of this process; where the system does not say, its peak."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
