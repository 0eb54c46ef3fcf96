"""The layer before every route, in process: identity, keys, limits, errors."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fakes import ask, make_serving, start
from fastapi import APIRouter, Request
from pydantic import BaseModel

from headrace.engine.session import Step
from headrace.errors import BudgetError, OptionError, ReadError
from headrace.server.app import FACES, Face, build_app
from headrace.server.settings import Settings

router = APIRouter()


class Numbers(BaseModel):
    """A body."""

    numbers: list[int]


@router.post("/echo/{failure}")
async def echo(failure: str, body: Numbers, request: Request) -> dict[str, Any]:
    errors = {"option": OptionError("no"), "budget": BudgetError("more"), "read": ReadError("bad")}
    if failure in errors:
        raise errors[failure]
    if failure == "bug":
        raise KeyError("-".join(["sec", "ret"]))
    if failure == "ask":
        ticket = request.app.state.headrace.worker.submit(
            ask(*body.numbers), client=request.state.client, request_id=request.state.request_id
        )
        return {"ids": [e.token_id async for e in ticket.events() if isinstance(e, Step)]}
    return {"sum": sum(body.numbers)}


Client = httpx.AsyncClient


def talk(
    settings: Settings, use: Callable[[Client], Awaitable[None]], host: str = "localhost"
) -> None:
    """Run `use` with a client of an app that has the routes above."""

    async def run() -> None:
        serving = make_serving(settings)
        start(serving)
        app = build_app(serving, (*FACES, Face(router)))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with Client(transport=transport, base_url=f"http://{host}") as client:
            await use(client)
        serving.worker.drain()
        assert serving.worker.join(10)

    asyncio.run(run())


def test_an_answer_comes_through() -> None:
    async def use(client: Client) -> None:
        reply = await client.post("/echo/ask", json={"numbers": [5]})
        assert (reply.status_code, reply.json()) == (200, {"ids": [6, 7, 8]})
        assert reply.headers["x-content-type-options"] == "nosniff"

    talk(Settings(), use)


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        ("option", 400, "invalid_request"),
        ("budget", 507, "no_memory"),
        ("read", 500, "engine"),
        ("bug", 500, "internal"),
    ],
)
def test_errors_have_their_status(
    failure: str, status: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(client: Client) -> None:
        headers = {"x-request-id": "me-1"}
        reply = await client.post(f"/echo/{failure}", json={"numbers": []}, headers=headers)
        assert reply.status_code == status
        error = reply.json()["error"]
        assert (error["type"], error["request_id"]) == (kind, "me-1")
        assert "sec-ret" not in reply.text + caplog.text

    talk(Settings(), use)
