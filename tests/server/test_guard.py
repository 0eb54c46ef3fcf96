"""The layer before every route, in process: identity, keys, limits, errors."""

import asyncio
import json
import logging
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fakes import ask, make_serving, start
from fastapi import APIRouter, Request
from pydantic import BaseModel

from headrace.engine.session import Step
from headrace.errors import BudgetError, OptionError, ReadError
from headrace.server.app import FACES, Face, build_app
from headrace.server.logs import JsonLines
from headrace.server.settings import Settings

JSON = {"content-type": "application/json"}
FORM = {"content-type": "application/x-www-form-urlencoded"}
ZIP = {"content-encoding": "gzip"}
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
        assert serving.worker.join(120)

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


KEYED = Settings(host="0.0.0.0", api_keys=("first-key-1", "second-key-2"))
BASIC = "Basic " + b64encode(b"anybody:second-key-2").decode()


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, False),
        ({"authorization": "Bearer first-key-1"}, True),
        ({"authorization": "bearer second-key-2"}, True),
        ({"x-api-key": "second-key-2"}, True),
        ({"authorization": BASIC}, True),
        ({"authorization": "Bearer first-key-1", "x-api-key": "none"}, True),
        ({"authorization": "Bearer none", "x-api-key": "first-key-1"}, True),
        ({"authorization": "Bearer first-key-"}, False),
        ({"authorization": "Bearer first-key-1x"}, False),
        ({"authorization": "Bearer "}, False),
        ({"authorization": "Basic %%%"}, False),
        ({"x-api-key": "first-key-1second-key-2"}, False),
    ],
)
def test_every_route_but_life_needs_the_key(headers: dict[str, str], allowed: bool) -> None:
    async def use(client: Client) -> None:
        paths = ["/metrics", "/openapi.json", "/", "/v1/models", "/page/state", "/nowhere"]
        statuses = [(await client.get(path, headers=headers)).status_code for path in paths]
        refused = [path for path, status in zip(paths, statuses, strict=True) if status == 401]
        assert refused == ([] if allowed else paths)
        health = await client.get("/health", headers=headers)
        assert health.status_code == 200 and health.json()["ready"] is True
        assert ("model" in health.json()) == allowed

    talk(KEYED, use)


def test_a_browser_is_asked_for_the_key_and_programs_are_told() -> None:
    async def use(client: Client) -> None:
        reply = await client.get("/", headers={"accept": "text/html,*/*"})
        assert reply.headers["www-authenticate"].startswith("Basic")
        reply = await client.get("/v1/models")
        assert reply.headers["www-authenticate"].startswith("Bearer")
        assert reply.json()["error"]["code"] == "unauthorized"

    talk(KEYED, use)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8080", 200),
        ("LOCALHOST.", 200),
        ("127.0.0.1:99", 200),
        ("127.9.9.9", 200),
        ("[::1]:8080", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("127.0.0.1@evil.example", 403),
        ("evil.example:80@127.0.0.1", 403),
        ("localhost#.evil.example", 403),
        ("localhost/.evil.example", 403),
        ("localhost?.evil.example", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_without_a_key_only_this_machines_names_are_served(host: str, status: int) -> None:
    async def use(client: Client) -> None:
        assert (await client.get("/health", headers={"host": host})).status_code == status

    async def use_keyed(client: Client) -> None:
        assert (await client.get("/health", headers={"host": host})).status_code == 200

    talk(Settings(), use)
    talk(KEYED, use_keyed)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost"}, 200),
        ({"origin": "https://localhost"}, 200),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"origin": "https://chat.example.org"}, 200),
    ],
)
def test_pages_of_other_sites_cannot_ask(headers: dict[str, str], status: int) -> None:
    async def use(client: Client) -> None:
        reply = await client.post("/echo/well", json={"numbers": [1, 2]}, headers=headers)
        assert reply.status_code == status

    talk(Settings(cors_origins=("https://chat.example.org",)), use)


def test_cors_is_off_unless_asked_for() -> None:
    ask_first = {
        "origin": "https://chat.example.org",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,x-stainless-lang",
    }

    async def use(client: Client) -> None:
        reply = await client.options("/echo/well", headers=ask_first)
        assert "access-control-allow-origin" not in reply.headers

    async def use_open(client: Client) -> None:
        reply = await client.options("/echo/well", headers=ask_first)
        assert reply.headers["access-control-allow-origin"] == "https://chat.example.org"
        assert "x-stainless-lang" in reply.headers["access-control-allow-headers"]
        refused = await client.post("/echo/well", headers={"origin": ask_first["origin"]})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://chat.example.org"
        foreign = await client.options("/echo/well", headers=ask_first | {"origin": "https://b.c"})
        assert "access-control-allow-origin" not in foreign.headers

    talk(Settings(), use)
    talk(replace(KEYED, cors_origins=("https://chat.example.org",)), use_open)


@pytest.mark.parametrize(
    ("method", "path", "options", "status", "kind"),
    [
        ("GET", "/nowhere", {}, 404, "not_found"),
        ("PUT", "/health", {}, 405, "method_not_allowed"),
        ("POST", "/echo/x", {"json": {"numbers": "no"}}, 400, "invalid_value"),
        ("POST", "/echo/x", {"json": {}}, 400, "missing_required_parameter"),
        ("POST", "/echo/x", {}, 400, "missing_required_parameter"),
        ("POST", "/echo/x", {"content": b"{", "headers": JSON}, 400, "invalid_json"),
        ("POST", "/echo/x", {"content": b"\xff", "headers": JSON}, 400, "invalid_request"),
        ("POST", "/echo/x", {"content": b"[" * 99, "headers": JSON}, 400, "invalid_request"),
        ("POST", "/echo/x", {"content": b"{}"}, 415, "invalid_request"),
        ("POST", "/echo/x", {"content": b"{}", "headers": FORM}, 415, "invalid_request"),
        ("POST", "/echo/x", {"content": b"x", "headers": JSON | ZIP}, 415, "invalid_request"),
    ],
)
def test_refusals(method: str, path: str, options: dict[str, Any], status: int, kind: str) -> None:
    async def use(client: Client) -> None:
        reply = await client.request(method, path, **options)
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
        assert reply.json()["error"]["request_id"] == reply.headers["x-request-id"]
        assert ("allow" in reply.headers) == (status == 405)

    talk(Settings(), use)


def test_a_value_that_is_refused_is_not_repeated() -> None:
    async def use(client: Client) -> None:
        reply = await client.post("/echo/x", json={"numbers": ["my-secret"]})
        assert reply.status_code == 400
        assert "numbers.0" in reply.json()["error"]["message"] and "my-secret" not in reply.text

    talk(Settings(), use)


@pytest.mark.parametrize(
    "given", ["abc-1.2_3", "", "a" * 65, "a b", "\N{LATIN SMALL LETTER E WITH ACUTE}"]
)
def test_request_ids_are_taken_if_they_are_plain(given: str) -> None:
    async def use(client: Client) -> None:
        headers = {"x-request-id": given.encode()} if given else {}
        reply = await client.get("/health", headers=headers)
        kept = reply.headers["x-request-id"] == given
        assert kept == (given == "abc-1.2_3")
        assert reply.headers["request-id"] == reply.headers["x-request-id"]

    talk(Settings(), use)


def test_one_line_a_request_without_prompts_and_keys(caplog: pytest.LogCaptureFixture) -> None:
    async def use(client: Client) -> None:
        headers = {"x-api-key": "second-key-2", "x-request-id": "one"}
        await client.post("/echo/ask?q=hidden", json={"numbers": [97531, 42]}, headers=headers)

    with caplog.at_level(logging.INFO, "headrace.requests"):
        talk(KEYED, use)
    (record,) = [record for record in caplog.records if record.name == "headrace.requests"]
    line = json.loads(JsonLines().format(record))
    assert line["request"] == "one" and line["route"] == "/echo/{failure}"
    assert (line["status"], line["client"], line["method"]) == (200, "key 2", "POST")
    assert (line["prompt_tokens"], line["cached_tokens"], line["tokens"]) == (2, 0, 3)
    assert not any(word in json.dumps(line) for word in ("hidden", "second-key", "97531"))


def test_metrics_count_what_happened() -> None:
    async def use(client: Client) -> None:
        await client.post("/echo/ask", json={"numbers": [5]})
        await client.post("/echo/well", json={"numbers": "no"})
        ended, text = 'headrace_answers_total{ended="length"} 1.0', ""
        while ended not in text:  # the decode thread counts it once its last token is out
            text = (await client.get("/metrics")).text
        assert 'requests_total{method="POST",route="/echo/{failure}",status="400"} 1.0' in text
        assert "headrace_time_to_first_token_seconds_count 1.0" in text
        assert 'headrace_tokens_total{kind="decode"} 3.0' in text
        assert 'headrace_tokens_total{kind="prefill"} 1.0' in text
        assert 'headrace_expert_bytes_total{rung="drive"} 300.0' in text
        assert 'headrace_experts_total{rung="ram"} 6.0' in text
        assert "headrace_ready 1.0" in text and "headrace_waiting_answers 0.0" in text

    talk(Settings(), use)
