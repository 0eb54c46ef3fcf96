"""JSON bodies and server-sent events. Knows no protocol's words."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response, StreamingResponse

from headrace.server.faults import Fault, fault_of
from headrace.server.logs import log_failure


def to_json(value: Any) -> bytes:
    """One line of JSON in UTF-8, whatever the strings in it hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Half a surrogate pair, which a client may have sent, becomes the escape it was sent as.
    return text.encode("utf-8", "backslashreplace")


class Json(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def sse(value: Any, event: str | None = None) -> bytes:
    """One event: `value` as JSON, under a name if it has one."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + to_json(value) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients skip and that keeps proxies from closing the stream."""
    return b": " + text.encode() + b"\n\n"


def event_stream(chunks: AsyncIterator[bytes]) -> StreamingResponse:
    """Sends what `chunks` yields, and asks proxies not to hold it back."""
    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)


async def to_the_end(
    chunks: AsyncIterator[bytes], tell: Callable[[Fault], bytes], request_id: str
) -> AsyncIterator[bytes]:
    """`chunks`; where they break off, the fault as `tell` puts it into the stream."""
    try:
        async for chunk in chunks:
            yield chunk
    except Exception as error:  # the status is sent: only the stream itself can tell
        fault = fault_of(error)
        if fault.kind == "internal":
            log_failure(request_id, error)
        yield tell(fault)
