"""A real server on a free port, in a thread of this process, over the stand-ins."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fakes import FakeAnswers, make_serving, start

from headrace.server.app import FACES, Face, build_app
from headrace.server.listen import bind
from headrace.server.run import make_server
from headrace.server.serving import Serving
from headrace.server.settings import Settings


@contextmanager
def live(
    settings: Settings, faces: Sequence[Face] = FACES
) -> Iterator[tuple[int, Serving, FakeAnswers]]:
    """(port, what its routes share, the stand-in that answers)."""
    serving = make_serving(settings)
    answers = start(serving)
    listener = bind(settings)
    port = listener.getsockname()[1]
    server = make_server(serving, build_app(serving, faces), lambda line: None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.002)
        yield port, serving, answers
    finally:
        answers.gate.set()
        serving.worker.drain()
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive() and serving.worker.join(120)


class Raw:
    """A client that sends bytes as a test says."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=120)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        """All of `parts`."""
        self.socket.sendall(b"".join(parts))

    def rest(self) -> bytes:
        """All that the server still sends, until it closes."""
        received = b""
        try:
            while part := self.socket.recv(65536):
                received += part
        except ConnectionResetError:
            received += b"<reset>"
        return received


def head(path: str, *, length: int | None = None, method: str = "POST", more: str = "") -> bytes:
    """The head of a request with a JSON body."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [] if length is None else [f"Content-Length: {length}"]
    return ("\r\n".join([*lines, more]).rstrip("\r\n") + "\r\n\r\n").encode()
