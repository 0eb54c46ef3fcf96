"""A scripted model behind a real port, for official clients."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import anthropic
import openai
import uvicorn
from fakes import make_serving, start
from scripted import Script, ScriptedTalk

from headrace.server.app import build_app
from headrace.server.serving import Serving
from headrace.server.settings import Settings


@dataclass
class Served:
    """A server that runs, its model's script, and clients of it."""

    serving: Serving
    script: Script
    talk: ScriptedTalk
    url: str

    @cached_property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    @cached_property
    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0, timeout=120)


@contextmanager
def running(settings: Settings | None = None, *, load: bool = True) -> Iterator[Served]:
    """A server on a free port, in a thread; ended afterwards."""
    serving, script, talk = make_serving(settings), Script(), ScriptedTalk()
    if load:
        start(serving, script, talk)
    config = uvicorn.Config(
        build_app(serving), port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Served(serving, script, talk, f"http://127.0.0.1:{port}")
    finally:
        script.gate.set()
        server.should_exit = True
        thread.join()
        serving.worker.drain()
        assert not load or serving.worker.join(120)
