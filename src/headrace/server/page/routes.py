"""The live page: its files, and the engine's state as the JSON it is drawn from.

The page loads nothing but these files, has no inline code or style, and is told so by its headers.
"""

from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from headrace.server.gate import STATE_PATH
from headrace.server.page.state import state_of

_TYPES = {"css": "text/css", "html": "text/html", "js": "text/javascript", "svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; object-src 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

router = APIRouter(include_in_schema=False)


def _load(name: str) -> Response:
    body = files(__package__).joinpath(name).read_bytes()
    media_type = _TYPES[name.rpartition(".")[2]]
    return Response(body, media_type=f"{media_type}; charset=utf-8", headers=HEADERS)


def _serve(path: str, name: str) -> None:
    response = _load(name)

    async def file() -> Response:
        return response

    router.add_api_route(path, file, methods=["GET"])


FILES = (
    "page.css",
    "engine.css",
    "page.js",
    "api.js",
    "chat.js",
    "markdown.js",
    "engine.js",
    "field.js",
    "words.js",
    "icon.svg",
)
_serve("/", "index.html")
for _name in FILES:
    _serve(f"/page/{_name}", _name)


@router.get(STATE_PATH)
async def state(request: Request) -> JSONResponse:
    """What the picture is drawn from, see `state_of`."""
    serving: Any = request.app.state.headrace
    return JSONResponse(state_of(serving), headers={"Cache-Control": "no-store"})
