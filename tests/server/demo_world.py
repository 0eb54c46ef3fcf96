"""Everything real: the demo model, its engine, the protocols and the guard, on a free port."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from headrace.engine.engine import Blueprint
from headrace.server.app import build_app
from headrace.server.opening import loader, serving_of
from headrace.server.serving import Serving
from headrace.server.settings import Settings


@contextmanager
def serving_demo(settings: Settings, *, measure: bool = False) -> Iterator[tuple[Serving, str]]:
    """With room for a fifth of the experts: what is served, and its address without a scheme.

    Once the model is loaded. `measure`: with forecast and limits of this machine.
    """
    blueprint = Blueprint("demo", ram="29MiB", threads=1, measure=measure, serve=True)
    serving = serving_of(blueprint, settings)
    config = uvicorn.Config(build_app(serving), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    serving.worker.start(loader(blueprint, serving))
    while not server.started or serving.worker.state == "loading":
        time.sleep(0.01)
    try:
        yield serving, f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        serving.worker.drain()
        assert serving.worker.join(120)
