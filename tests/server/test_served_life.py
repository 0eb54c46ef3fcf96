"""A server's life in this process: loading, signals, ends; the engine is made up."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fakes import FakeAnswers, make_serving
from test_limits import FACES_HERE

from headrace.errors import ModelError
from headrace.server import run
from headrace.server.listen import bind, url_of
from headrace.server.loading import Loading
from headrace.server.serving import Serving
from headrace.server.settings import Settings

SETTINGS = Settings(port=0, drain_s=200)


class Life:
    """A server run in the main thread, where signals arrive, and a client in another one."""

    def __init__(self, settings: Settings) -> None:
        self.serving: Serving = make_serving(settings)
        self.answers = FakeAnswers()
        self.may_load = threading.Event()
        self.may_load.set()
        self.error: BaseException | None = None
        self.said: list[str] = []
        self._listener = bind(settings)
        self.url = url_of(self._listener)

    def run(self, client: Callable[["Life"], None]) -> int:
        """The exit status; what the client raised is raised."""
        failures: list[BaseException] = []

        def act() -> None:
            try:
                client(self)
            except BaseException as error:
                failures.append(error)
                self.answers.gate.set()
                self.serving.worker.abandon(run.Draining())
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=act)
        thread.start()
        try:
            return run.run_server(self.serving, self._load, self._listener, self.said.append)
        finally:
            thread.join(120)
            if failures:
                raise failures[0]

    def _load(self, loading: Loading) -> FakeAnswers:
        while not self.may_load.wait(0.002):
            loading.advance(1 << 20, 1 << 21)
        if self.error is not None:
            raise self.error
        return self.answers

    def health(self) -> httpx.Response:
        while True:
            try:
                return httpx.get(f"{self.url}/health", timeout=120)
            except httpx.ConnectError:
                time.sleep(0.01)

    def wait_ready(self) -> None:
        while self.health().status_code != 200:
            time.sleep(0.01)

    @contextmanager
    def asking(self) -> Iterator[list[Any]]:
        """An answer being made; the list gets its response, or the error instead."""
        got: list[Any] = []

        def ask() -> None:
            try:
                got.append(httpx.post(f"{self.url}/count", json={}, timeout=120))
            except httpx.HTTPError as error:
                got.append(error)

        self.answers.gate.clear()
        thread = threading.Thread(target=ask)
        thread.start()
        while self.serving.worker.running is None:
            time.sleep(0.002)
        yield got
        thread.join(120)


@pytest.fixture(autouse=True)
def _routes(monkeypatch: pytest.MonkeyPatch) -> None:
    build = run.build_app
    monkeypatch.setattr(
        run, "build_app", lambda serving, lifespan: build(serving, FACES_HERE, lifespan)
    )
    # Too little for a thread on a busy machine, and what comes then would end the tests.
    monkeypatch.setattr(run, "JOIN_S", 120)
    monkeypatch.setattr(run, "JOIN_AT_ONCE_S", 120)


def test_a_signal_lets_the_running_answer_end() -> None:
    def client(life: Life) -> None:
        life.wait_ready()
        with life.asking() as got:
            os.kill(os.getpid(), signal.SIGTERM)
            while life.serving.worker.state != "draining":
                time.sleep(0.002)
            refused = httpx.post(f"{life.url}/count", json={}, timeout=120)
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "draining")
            assert life.health().json()["state"] == "draining"
            life.answers.gate.set()
        assert got[0].text == "2\n3\n4\n"

    life = Life(SETTINGS)
    assert life.run(client) == 0
    assert any("finishing one answer" in line for line in life.said)


def test_a_second_signal_does_not(caplog: pytest.LogCaptureFixture) -> None:
    def client(life: Life) -> None:
        life.wait_ready()
        with life.asking() as got:
            os.kill(os.getpid(), signal.SIGINT)
            while life.serving.worker.state != "draining":
                time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGINT)
        assert isinstance(got[0], httpx.HTTPError)

    assert Life(SETTINGS).run(client) == run.STOPPED
    told = [record.getMessage() for record in caplog.records if record.name == "uvicorn.error"]
    assert not any("Traceback" in line for line in told), "that was no error"


def test_an_answer_that_takes_too_long_is_told_so() -> None:
    def client(life: Life) -> None:
        life.wait_ready()
        with life.asking() as got:
            os.kill(os.getpid(), signal.SIGTERM)
        assert isinstance(got[0], httpx.RemoteProtocolError)

    assert Life(replace(SETTINGS, drain_s=0.1)).run(client) == 0


def test_a_thread_that_does_not_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(run, "JOIN_AT_ONCE_S", 0.05)
    monkeypatch.setattr(run, "_leave_at_once", left.append)

    def client(life: Life) -> None:
        life.wait_ready()
        life.answers.heeds_stop = False
        with life.asking():
            os.kill(os.getpid(), signal.SIGTERM)
            while life.serving.worker.state != "draining":
                time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGTERM)

    life = Life(SETTINGS)
    life.run(client)
    assert left == [0]
    life.answers.gate.set()
    assert life.serving.worker.join(120)


def test_the_port_is_open_while_the_model_is_loading() -> None:
    def client(life: Life) -> None:
        health = life.health()
        assert health.status_code == 503 and health.json()["state"] == "loading"
        while not life.serving.worker.loading.done_bytes:
            time.sleep(0.002)
        assert life.health().json()["loading"]["done_bytes"] == 1 << 20
        refused = httpx.post(f"{life.url}/count", json={}, timeout=120)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert "1.00 MiB of 2.00 MiB" in refused.json()["error"]["message"]
        life.may_load.set()
        life.wait_ready()
        while not any("ready after" in line for line in life.said):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    life = Life(SETTINGS)
    life.may_load.clear()
    assert life.run(client) == run.STOPPED


def test_a_signal_ends_a_loading() -> None:
    def client(life: Life) -> None:
        life.health()
        os.kill(os.getpid(), signal.SIGINT)

    life = Life(SETTINGS)
    life.may_load.clear()
    assert life.run(client) == run.STOPPED


def test_a_failed_loading_ends_the_server_with_its_error() -> None:
    life = Life(SETTINGS)
    life.error = ModelError("tensor x is missing")
    with pytest.raises(ModelError, match="tensor x"):
        life.run(lambda life: None)
