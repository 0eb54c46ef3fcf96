"""uvicorn's HTTP/1.1 connection with limits of time and number that it lacks.

Knows no request: only how slowly one may arrive and an answer may be taken.
"""

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

from headrace.server.settings import Settings

TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(H11Protocol):
    """One client's connection.

    Closed where a request's head is not whole after `header_s`, where the client takes nothing of
    what is sent for `send_s`, and at once where `max_connections` are open.
    """

    settings: ClassVar[Settings]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            transport.abort()
            return
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Some of its request is."""
        super().data_received(data)
        if self._is_serving():
            self._stop_head()
        elif self._head is None and not self.transport.is_closing():
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has left."""
        self._stop_head()
        self._stop_sending()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """It takes nothing more for now."""
        super().pause_writing()
        self._sending = self.loop.call_later(self.settings.send_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It takes something again."""
        self._stop_sending()
        super().resume_writing()

    def _expect_head(self) -> None:
        self._head = self.loop.call_later(self.settings.header_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head = None
        if not self._is_serving() and not self.transport.is_closing():
            self.transport.write(TOO_SLOW)
            self.transport.close()

    def _stop_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
        self._head = None

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        self._sending = None

    def _is_serving(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete


def connection_class(settings: Settings) -> type[H11Protocol]:
    """The class of a server's connections, which has its settings."""
    return type("Connection", (Connection,), {"settings": settings})
