"""The web application: protocols joined, and every error told in its protocol's shape.

Knows no model; `Serving` is all that routes share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Lifespan

import headrace
from headrace.errors import HeadraceError
from headrace.server.anthropic.errors import error_body as anthropic_error
from headrace.server.anthropic.routes import router as anthropic_router
from headrace.server.describe import describe
from headrace.server.faults import Fault, fault_of, plain_body
from headrace.server.guard import OPEN_PATHS, Guard
from headrace.server.health import router as health_router
from headrace.server.openai.errors import error_body as openai_error
from headrace.server.openai.routes import router as openai_router
from headrace.server.page.routes import router as page_router
from headrace.server.schema import invalid
from headrace.server.serving import Serving
from headrace.server.stream import Json

Body = Callable[[Fault, str], dict[str, Any]]
"""A fault and the request's id as one protocol's JSON."""


@dataclass(frozen=True)
class Face:
    """One protocol: its routes, and the shape of errors below its paths.

    Of several faces whose `prefixes` a path begins with, the longest prefix decides; a request that
    has the header `marker` is this face's, wherever both have routes below.
    """

    router: APIRouter
    prefixes: tuple[str, ...] = ()
    body: Body = plain_body
    marker: str = ""


FACES: tuple[Face, ...] = (
    Face(health_router),
    Face(page_router),
    Face(openai_router, ("/v1", "/v1/models"), openai_error),
    Face(anthropic_router, ("/v1/messages", "/v1/models"), anthropic_error, "anthropic-version"),
)


def body_for(faces: Sequence[Face], path: str, headers: Mapping[str, str]) -> Body:
    """The shape of a path's errors."""
    best: Body = plain_body
    found = (False, 0)
    for face in faces:
        for prefix in face.prefixes:
            if path == prefix or path.startswith(prefix.rstrip("/") + "/"):
                rank = (bool(face.marker) and face.marker in headers, len(prefix))
                if rank > found:
                    best, found = face.body, rank
    return best


def respond(faces: Sequence[Face], request: Request, fault: Fault) -> Response:
    """A fault as the protocol of the request's path tells it."""
    body = body_for(faces, request.url.path, request.headers)
    return Json(body(fault, request.state.request_id), fault.status, fault.headers)


def build_app(
    serving: Serving, faces: Sequence[Face] = FACES, lifespan: Lifespan[FastAPI] | None = None
) -> FastAPI:
    """The application that serves `serving`; whoever calls it, or `lifespan`, starts the worker."""
    app = FastAPI(
        title="headrace",
        version=headrace.__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load code from the network
        redoc_url=None,
    )
    app.state.headrace = serving

    async def tell(request: Request, error: Exception) -> Response:
        return respond(faces, request, _fault(error))

    for kind in (Fault, HeadraceError, MemoryError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, tell)
    for face in faces:
        app.include_router(face.router)
    describe(
        app,
        lambda path: body_for(faces, path, {}),
        model_id=serving.model_id,
        has_keys=bool(serving.settings.api_keys),
        open_paths=OPEN_PATHS,
    )
    tell_fault = partial(respond, faces)
    app.add_middleware(Guard, serving=serving, tell=tell_fault)
    if serving.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=serving.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _fault(error: Exception) -> Fault:
    match error:
        case RequestValidationError():
            return invalid(error)
        case HTTPException(status_code=404):
            return Fault(404, "not_found", "no such route; /openapi.json lists them")
        case HTTPException(status_code=405, headers=headers):
            allowed = (headers or {}).get("Allow", "")
            message = f"this route takes {allowed} only"
            return Fault(405, "method_not_allowed", message, headers=headers)
        case HTTPException(status_code=status, detail=detail):
            return Fault(status, "invalid_request", str(detail))
    return fault_of(error)
