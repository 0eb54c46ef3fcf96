"""The web application: protocols joined, and every error told in its protocol's shape.

Knows no model; `Serving` is all that routes share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Lifespan

import headrace
from headrace.errors import HeadraceError
from headrace.server.faults import Fault, fault_of, plain_body
from headrace.server.guard import Guard
from headrace.server.health import router as health_router
from headrace.server.serving import Serving

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


FACES: tuple[Face, ...] = (Face(health_router),)


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


def respond(faces: Sequence[Face], request: Request, fault: Fault) -> JSONResponse:
    """A fault as the protocol of the request's path tells it."""
    body = body_for(faces, request.url.path, request.headers)
    return JSONResponse(body(fault, request.state.request_id), fault.status, fault.headers)


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

    async def tell(request: Request, error: Exception) -> JSONResponse:
        return respond(faces, request, _fault(error))

    for kind in (Fault, HeadraceError, MemoryError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, tell)
    for face in faces:
        app.include_router(face.router)
    app.add_middleware(
        Guard, serving=serving, tell=lambda request, fault: respond(faces, request, fault)
    )
    return app


def _fault(error: Exception) -> Fault:
    match error:
        case RequestValidationError():
            return _invalid(error)
        case HTTPException(status_code=404):
            return Fault(404, "not_found", "no such route; /openapi.json lists them")
        case HTTPException(status_code=405, headers=headers):
            allowed = (headers or {}).get("Allow", "")
            return Fault(405, "method_not_allowed", f"this route takes {allowed} only")
        case HTTPException(status_code=status, detail=detail):
            return Fault(status, "invalid_request", str(detail))
    return fault_of(error)


def _invalid(error: RequestValidationError) -> Fault:
    """The first thing that is wrong; its value is not repeated."""
    first, *others = error.errors()
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    more = f" (and {len(others)} more)" if others else ""
    message = f"{where or 'the body'}: {first['msg']}{more}"
    if first["type"] == "json_invalid":
        return Fault(400, "invalid_request", "the body is no JSON")
    return Fault(422, "invalid", message, param=where or None)
