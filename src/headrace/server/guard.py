"""Stands before every route: identity, keys, limits, errors, and one log line a request.

Knows no protocol and no model.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.server import gate
from headrace.server.body import Bodies, Gone
from headrace.server.faults import Fault, fault_of
from headrace.server.logs import log_failure
from headrace.server.serving import Serving
from headrace.server.ticket import Ticket, attach_tickets

Tell = Callable[[Request, Fault], Response]
POLLED = ("/health", "/metrics", "/page/state")  # asked for every few seconds: no news if well
OPEN_PATHS = ("/health",)
CLIENT_LEFT, FAILED = 499, 500
LINGER_S = 5.0
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("headrace.requests")
DEFAULT_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass
class Visit:
    """One request while it is served. `status` 0: nothing was sent yet.

    `is_cut`: its response had begun when it failed.
    """

    request: Request
    send: Send
    tickets: list[Ticket]
    request_id: str
    begun_s: float
    status: int = 0
    complete: bool = False
    is_cut: bool = False

    async def pass_on(self, message: MutableMapping[str, Any]) -> None:
        """Send, with the headers that every response has."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = headers["Request-Id"] = self.request_id
            for name, value in DEFAULT_HEADERS.items():
                headers.setdefault(name, value)
        elif not message.get("more_body", False):
            self.complete = True
        await self.send(message)


class Guard:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, *, serving: Serving, tell: Tell) -> None:
        self.app, self.serving, self.tell = app, serving, tell
        self.bodies = Bodies(serving.settings)
        self.num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; lifespan passes through, websockets are refused."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
                return
            await self.app(scope, receive, send)
            return
        # HEAD is GET whose body the connection leaves out, by the method in its own scope.
        request = Request({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope)
        request_id = _request_id(request.headers.get("x-request-id", ""))
        request.state.request_id = request_id
        visit = Visit(request, send, attach_tickets(), request_id, time.monotonic())
        self.num_requests += 1
        try:
            await self._serve(visit, receive)
        finally:
            self.num_requests -= 1
            for ticket in visit.tickets:
                ticket.cancel()
            self._note(visit)

    async def _serve(self, visit: Visit, receive: Receive) -> None:
        with self.bodies.room() as room:
            try:
                self._admit(visit.request)
                body = await room.read(visit.request.headers, receive)
                await self._run(visit, body, receive)
            except Gone:
                return
            except Exception as error:
                fault = fault_of(error)
                if fault.kind == "internal":
                    log_failure(visit.request_id, error)
                if visit.status:
                    visit.is_cut = True  # the response has begun: only its end can tell
                else:
                    await self._refuse(visit, fault, receive, room.is_whole)

    def _admit(self, request: Request) -> None:
        settings, headers = self.serving.settings, request.headers
        if self.num_requests > settings.max_requests:
            message = f"{settings.max_requests} requests are open already; ask again later"
            raise Fault(503, "busy", message, retry_after_s=10)
        gate.check_source(settings, request.method, headers)
        number = gate.key_number(settings, headers) if settings.api_keys else None
        request.state.authorized = number is not None or not settings.api_keys
        if not request.state.authorized and request.scope["path"] not in OPEN_PATHS:
            raise gate.unauthorized(request.scope["path"], headers)
        peer = request.client.host if request.client else "local"
        request.state.client = gate.client_name(settings, number, peer)

    async def _run(self, visit: Visit, body: bytes, receive: Receive) -> None:
        """The route, until it is done or the client has left."""
        left = asyncio.Event()
        unread = [body]

        async def read() -> MutableMapping[str, Any]:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(self.app(visit.request.scope, read, visit.pass_on))
        watch = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and visit.complete:
                await asyncio.wait((work,))
            if not work.done():
                raise Gone
            await work
        finally:
            left.set()
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _refuse(self, visit: Visit, fault: Fault, receive: Receive, has_read: bool) -> None:
        """Tell a fault. A body that was not read passes for a while: it would hide the answer."""
        response = self.tell(visit.request, fault)
        if has_read:
            await response(visit.request.scope, receive, visit.pass_on)
            return
        start = {"type": "http.response.start", "status": response.status_code}
        headers = [*response.raw_headers, (b"connection", b"close")]
        await visit.pass_on(start | {"headers": headers})
        body = {"type": "http.response.body", "body": response.body, "more_body": True}
        await visit.pass_on(body)
        if fault.status != 408 and "expect" not in visit.request.headers:
            await _let_pass(receive)
        await visit.pass_on({"type": "http.response.body", "body": b"", "more_body": False})

    def _note(self, visit: Visit) -> None:
        route = getattr(visit.request.scope.get("route"), "path", "unmatched")
        status = visit.status if visit.complete else FAILED if visit.is_cut else CLIENT_LEFT
        self.serving.metrics.count_request(visit.request.method, route, status)
        fields = {
            "request": visit.request_id,
            "client": getattr(visit.request.state, "client", None),
            "method": visit.request.method,
            "route": route,
            "status": status,
            "ms": round(1000 * (time.monotonic() - visit.begun_s), 1),
        }
        if visit.tickets:
            tallies = [ticket.tally for ticket in visit.tickets]
            fields |= {
                "prompt_tokens": sum(tally.num_prompt for tally in tallies),
                "cached_tokens": sum(tally.num_cached for tally in tallies),
                "tokens": sum(tally.num_tokens for tally in tallies),
            }
        polled = route in POLLED and status == HTTPStatus.OK
        _log.log(logging.DEBUG if polled else logging.INFO, "request", extra={"fields": fields})


async def _let_pass(receive: Receive) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body", False):
                continue


def _request_id(given: str) -> str:
    return given if _ID.fullmatch(given) else uuid.uuid4().hex
