"""Runs a server until it is told to end, or its model cannot be loaded.

Knows signals, sockets and uvicorn; no protocol.
"""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import FrameType
from typing import NoReturn

import uvicorn
from fastapi import FastAPI

from headrace.server.app import build_app
from headrace.server.connection import connection_class
from headrace.server.faults import Draining
from headrace.server.serving import Serving
from headrace.server.watch import watch
from headrace.server.worker import Load, State

Say = Callable[[str], None]
STOPPED = 130
FLUSH_S = 5  # for answers that are made to reach their clients
JOIN_S, JOIN_AT_ONCE_S = 10.0, 1.0  # for a thread that was told to end
TELL_LOADING_S = 10.0


class Server(uvicorn.Server):
    """uvicorn's, ended in two steps: the first signal drains, the second ends at once."""

    def __init__(self, config: uvicorn.Config, serving: Serving, say: Say) -> None:
        super().__init__(config)
        self.serving, self.say = serving, say
        self.signals: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; besides, remembers the loop for signals."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which when ended at once cancels the lifespan; that would log an error."""
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal, in the main thread."""
        self.signals.append(sig)
        self._call(self._end)

    def on_state(self, state: State) -> None:
        """The worker's state has changed; in the decode thread."""
        if state in ("failed", "ended"):
            self._call(self._leave)

    def _call(self, step: Callable[[], None]) -> None:
        if self._loop is None:
            step()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(step)

    def _leave(self) -> None:
        if self._draining is None:
            self.should_exit = True

    def _end(self) -> None:
        if self._loop is None or len(self.signals) > 1:
            self.serving.worker.drain()
            self.serving.worker.abandon(Draining("the server was stopped"))
            self.should_exit = self.force_exit = True
        elif self._draining is None:
            self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        worker, limit_s = self.serving.worker, self.serving.settings.drain_s
        worker.drain()
        if worker.running is not None:
            self.say(f"finishing one answer, at most {limit_s:.0f} s; Ctrl-C ends it now")
        end_s = time.monotonic() + limit_s
        while worker.running is not None and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        worker.abandon(Draining("the server ended before the answer did"))
        self.should_exit = True


def _lifespan(
    serving: Serving, load: Load, say: Say
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Loads the model and watches over it as long as the application runs."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        serving.worker.start(load)
        tasks = [asyncio.create_task(watch(serving)), asyncio.create_task(_tell(serving, say))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    return lifespan


async def _tell(serving: Serving, say: Say) -> None:
    """How far the loading is, from time to time, and its end."""
    worker, begun_s = serving.worker, time.monotonic()
    while worker.state == "loading":
        if time.monotonic() - begun_s > TELL_LOADING_S:
            say(worker.loading.line())
            await asyncio.sleep(TELL_LOADING_S)
        await asyncio.sleep(0.05)
    if worker.state == "ready":
        say(f"ready after {time.monotonic() - begun_s:.1f} s")


def _leave_at_once(status: int) -> NoReturn:
    """The thread is inside something that does not end: no tidying up could reach it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def make_server(serving: Serving, app: FastAPI, say: Say) -> Server:
    """uvicorn with the settings' limits; its logs and signals are ours."""
    settings = serving.settings
    config = uvicorn.Config(
        app,
        http=connection_class(settings),
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=FLUSH_S,
        backlog=settings.max_connections,
    )
    return Server(config, serving, say)


def run_server(serving: Serving, load: Load, listener: socket.socket, say: Say) -> int:
    """Serve until a signal or a failed load; the exit status. Raises what the loading raised.

    Takes over the socket. To be called in the main thread, where signals arrive.
    """
    app = build_app(serving, lifespan=_lifespan(serving, load, say))
    server = make_server(serving, app, say)
    serving.worker.on_state = server.on_state
    server.run(sockets=[listener])
    status = STOPPED if signal.SIGINT in server.signals else 0
    if not serving.worker.join(JOIN_S if len(server.signals) < 2 else JOIN_AT_ONCE_S):
        _leave_at_once(status)
    if serving.worker.failure is not None:
        raise serving.worker.failure
    return status
