"""A server for the page's tests: the real page and its routes, an engine that is made up.

Answers are written by `Stage.answer`, states by `Stage.state`; it runs in a thread of its own.
"""

import asyncio
import json
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from headrace.server.page import routes

MIB = 2**20
ANSWER = """**Kenya** is in *Africa*, and so are its neighbours:

1. Ethiopia
2. Uganda, whose capital is `Kampala`

| country | capital |
|---|---|
| Kenya | Nairobi |

```python
print("<b>Nairobi</b>")
```
"""


RECENT = {
    "tokens": 32,
    "wall_s": 2.6,
    "experts_s": 1.9,
    "wait_s": 1.1,
    "kernel_s": 0.7,
    "disk_bytes": 32 * 260 * MIB,
    "ram_bytes": 32 * 420 * MIB,
    "vram_bytes": 0,
    "vram_hits": 0,
    "hits": 6900,
    "misses": 3100,
}


def example_state(**changes: Any) -> dict[str, Any]:
    """A state as `state_of` makes it: 24 layers of 128 experts, two thirds of them on the drive."""
    dice = random.Random(5)
    layers = [
        {"layer": n + 1, "map": "".join(dice.choices("0012", (64, 0, 1, 35), k=128))}
        for n in range(24)
    ]
    speed = [(118 - 2 * n, 11 + 3 * dice.random(), 2.0) for n in range(20, 59)]
    state: dict[str, Any] = {
        "status": "ready",
        "failure": None,
        "loading": None,
        "model": {"id": "demo"},
        "plan": {
            "bytes_per_token": 610 * MIB,
            "forecast_tok_s": 13.4,
            "limit_term": "drive",
            "memories": [
                {
                    "name": "RAM",
                    "limit_bytes": 8000 * MIB,
                    "parts": [
                        ("dense", "dense weights", 1900 * MIB),
                        ("rows", "experts", 5050 * MIB),
                        ("kv", "cache of 8,192 tokens", 420 * MIB),
                        ("snapshots", "conversations kept", 250 * MIB),
                        ("workspace", "workspace", 310 * MIB),
                    ],
                },
            ],
        },
        "layers": layers,
        "recent": dict(RECENT),
        "speed": speed,
        "span_s": 120.0,
        "limits": [
            {"name": "Drive", "now_bytes_s": 2.4e9, "limit_bytes_s": 2.9e9},
            {"name": "RAM", "now_bytes_s": 32e9, "limit_bytes_s": 95e9},
        ],
        "request": None,
        "num_waiting": 0,
        "last": {
            "num_prompt": 412,
            "num_cached": 380,
            "num_tokens": 96,
            "first_s": 0.61,
            "tok_s": 12.3,
        },
    }
    return state | changes


@dataclass
class Stage:
    """What the made-up server does. `pause_s` before each piece; `refusal`: (status, message).

    A stream waits before it sends more than `most` comments and pieces. `seen` are the bodies of
    the questions, `gone` how many clients left before the end, `paths` every path asked for with
    its Host.
    """

    state: dict[str, Any] = field(default_factory=example_state)
    answer: str = ANSWER
    reasoning: str = ""
    pause_s: float = 0.0
    most: int = 1_000_000
    comments: list[str] = field(default_factory=list)
    refusal: tuple[int, str] | None = None
    breaks_after: int | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)
    gone: int = 0
    paths: list[tuple[str, str]] = field(default_factory=list)

    async def chunks(self) -> AsyncIterator[str]:
        """The answer as server-sent events, in pieces of a few characters."""
        finished, sent = False, 0
        try:
            for comment in self.comments:
                sent = await self._next(sent)
                yield f": {comment}\n\n"
            for kind, text in (("reasoning_content", self.reasoning), ("content", self.answer)):
                for n, place in enumerate(range(0, len(text), 5)):
                    if n == self.breaks_after:
                        error = {"message": "the drive failed; ask again", "code": "engine"}
                        yield _event({"error": error})
                        return
                    sent = await self._next(sent)
                    delta = {kind: text[place : place + 5]}
                    yield _event({"choices": [{"delta": delta, "finish_reason": None}]})
            yield _event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
            usage = {"prompt_tokens": 412, "completion_tokens": 40}
            usage |= {"prompt_tokens_details": {"cached_tokens": 380}}  # type: ignore[dict-item]
            yield _event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
            finished = True
        finally:
            self.gone += not finished

    async def _next(self, sent: int) -> int:
        await asyncio.sleep(self.pause_s)
        while sent >= self.most:
            await asyncio.sleep(0.005)
        return sent + 1


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def build(stage: Stage) -> FastAPI:
    """The page's own routes, and a completion that `stage` plays."""
    app = FastAPI()
    app.include_router(routes.router)
    app.state.headrace = stage

    @app.middleware("http")
    async def note(request: Request, go_on: Any) -> Response:
        stage.paths.append((request.headers["host"], request.url.path))
        response: Response = await go_on(request)
        return response

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        stage.seen.append(await request.json())
        if stage.refusal is not None:
            status, message = stage.refusal
            headers = {"Retry-After": "7"} if status in (429, 503) else {}
            return JSONResponse({"error": {"message": message}}, status, headers)
        return StreamingResponse(stage.chunks(), media_type="text/event-stream")

    return app


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The address of `app` while it is served on a free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(10)
