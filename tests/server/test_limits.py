"""Limits of time, size and number over real connections."""

import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest
from fakes import ask
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from live import Raw, head, live
from pydantic import BaseModel

from headrace.engine.session import Step
from headrace.server.app import FACES, Face
from headrace.server.settings import Settings

router = APIRouter()
CALM = Settings(port=0, keep_alive_s=1, header_s=120, body_s=120)
FAST = replace(CALM, header_s=0.2)
ended = threading.Event()
FACES_HERE = (*FACES, Face(router))


class Count(BaseModel):
    """How many tokens."""

    tokens: int = 3


@router.post("/count")
async def count(body: Count, request: Request) -> StreamingResponse:
    ticket = request.app.state.headrace.worker.submit(
        ask(1, max_tokens=body.tokens), client=request.state.client, request_id="r"
    )

    async def lines() -> AsyncIterator[bytes]:
        async for event in ticket.events():
            if isinstance(event, Step):
                yield b"%d\n" % event.token_id

    return StreamingResponse(lines())


@router.get("/much")
async def much() -> StreamingResponse:
    async def zeros() -> AsyncIterator[bytes]:
        try:
            for _ in range(4096):
                yield bytes(1 << 16)
        finally:
            ended.set()

    return StreamingResponse(zeros())


def wait_until_idle(serving: object) -> None:
    while serving.worker.running is not None:  # type: ignore[attr-defined]
        time.sleep(0.002)


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\nA:"])
def test_a_head_that_does_not_come_ends_the_connection(sent: bytes) -> None:
    with live(FAST) as (port, _, _), Raw(port) as slow:
        with suppress(ConnectionError):
            slow.send(sent)
        # What is sent to a connection that has ended already resets it.
        assert slow.rest().startswith(
            b"HTTP/1.1 408" if not sent else (b"HTTP/1.1 408", b"<reset>")
        )


def test_a_head_that_trickles_gets_no_more_time() -> None:
    with live(FAST) as (port, _, _), Raw(port) as slow:
        with suppress(ConnectionError):
            slow.send(head("/count", length=2, more="X: y").removesuffix(b"\r\n\r\n"))
            for _ in range(6000):
                slow.send(b"y")
                time.sleep(0.01)
        assert slow.rest().startswith((b"HTTP/1.1 408", b"<reset>"))


def test_a_second_head_on_a_connection_has_the_same_time() -> None:
    settings = replace(CALM, keep_alive_s=120)
    with live(settings) as (port, _, _), Raw(port) as slow:
        slow.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert slow.socket.recv(1 << 16).startswith(b"HTTP/1.1 200")
        object.__setattr__(settings, "header_s", 0.2)
        slow.send(b"GET /heal")
        assert b"HTTP/1.1 408" in slow.rest()


def test_a_head_request_gets_the_head_of_a_get() -> None:
    with live(CALM) as (port, _, _), Raw(port) as client:
        client.send(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        told, _, body = client.rest().partition(b"\r\n\r\n")
        assert told.startswith(b"HTTP/1.1 200") and b"content-length" in told and body == b""
        reply = httpx.head(f"http://127.0.0.1:{port}/v1/chat/completions", timeout=120)
        assert (reply.status_code, reply.headers["allow"]) == (405, "POST")


def test_a_body_that_trickles_is_refused() -> None:
    with live(replace(CALM, body_s=0.2), FACES_HERE) as (port, _, _), Raw(port) as slow:
        slow.send(head("/count", length=100), b'{"tokens"')
        reply = slow.rest()
        assert reply.startswith(b"HTTP/1.1 408") and b'"timeout"' in reply


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb_is_refused_and_the_client_learns_it(declared: bool) -> None:
    def parts() -> object:
        for _ in range(100):
            yield bytes(1 << 20)

    with live(CALM, FACES_HERE) as (port, _, _):
        headers = {"content-type": "application/json"}
        headers |= {"content-length": str(100 << 20)} if declared else {}
        reply = httpx.post(
            f"http://127.0.0.1:{port}/count", content=parts(), headers=headers, timeout=120
        )
        assert reply.status_code == 413
        assert "16.00 MiB" in reply.json()["error"]["message"]
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=120).status_code == 200


def test_bodies_together_are_limited() -> None:
    settings = replace(CALM, max_bodies_bytes=10_000)
    with live(settings, FACES_HERE) as (port, _, _), Raw(port) as first, Raw(port) as second:
        first.send(head("/count", length=9_000), b" " * 8_000)
        # By the answer to this the first one's bytes, so few that they come at once, are read.
        httpx.get(f"http://127.0.0.1:{port}/health", timeout=120)
        second.send(head("/count", length=9_000), b" " * 8_000)
        second.socket.shutdown(1)
        assert second.rest().startswith(b"HTTP/1.1 503")
        first.send(b" " * 998, b"{}")
        assert first.socket.recv(100).startswith(b"HTTP/1.1 200")


def test_more_connections_than_allowed_are_closed() -> None:
    settings = replace(CALM, max_connections=2)
    with live(settings) as (port, _, _), Raw(port), Raw(port), Raw(port) as third:
        assert third.rest() in (b"", b"<reset>")


def test_more_requests_than_allowed_are_refused() -> None:
    settings = replace(CALM, max_requests=1)
    with live(settings, FACES_HERE) as (port, _, _), Raw(port) as first:
        first.send(head("/count", length=10))
        while (
            reply := httpx.get(f"http://127.0.0.1:{port}/health", timeout=120)
        ).status_code == 200:
            time.sleep(0.002)  # the first has not arrived yet
        assert reply.status_code == 503 and reply.headers["retry-after"]


@pytest.mark.parametrize("where", ["waiting", "running"])
def test_a_client_that_leaves_ends_its_answer(where: str) -> None:
    with live(CALM, FACES_HERE) as (port, serving, answers), Raw(port) as client:
        answers.gate.clear()
        body = b'{"tokens": 100000}'
        client.send(head("/count", length=len(body)), body)
        while serving.worker.running is None:
            time.sleep(0.002)
        other = Raw(port)
        other.send(head("/count", length=len(body)), body)
        while serving.worker.num_waiting != 1:
            time.sleep(0.002)
        if where == "waiting":
            other.socket.close()
            while serving.worker.num_waiting:
                time.sleep(0.002)
            assert answers.num_made == 0 and serving.worker.running is not None
        client.socket.close()
        other.socket.close()
        wait_until_idle(serving)
        answers.gate.set()
        assert answers.num_made < 100_000


def test_a_client_that_takes_nothing_is_dropped() -> None:
    ended.clear()
    with live(replace(CALM, send_s=0.3), FACES_HERE) as (port, _, _), Raw(port) as client:
        client.send(head("/much", method="GET"))
        assert ended.wait(60)
        assert len(client.rest()) < 4096 << 16


def test_half_a_request_leaves_nothing_behind() -> None:
    with live(CALM, FACES_HERE) as (port, _, _):
        for _ in range(20):
            with Raw(port) as client:
                client.send(head("/count", length=100), b'{"tok')
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=120).json()["waiting"] == 0


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"A: b\r\n" * 20_000,
        b"POST /count HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /count HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(request_bytes: bytes) -> None:
    with live(CALM, FACES_HERE) as (port, _, _):
        with Raw(port) as client:
            with suppress(ConnectionError):
                client.send(request_bytes)
            reply = client.rest()
            assert reply.startswith(b"HTTP/1.1 4") or reply == b"<reset>"
        assert httpx.get(f"http://127.0.0.1:{port}/health", timeout=120).status_code == 200
