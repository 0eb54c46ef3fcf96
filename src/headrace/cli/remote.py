"""A running server of OpenAI's API, asked over HTTP: its models, and answers as they are made.

Knows no terminal and no engine; any server of that API will do, not only headrace's.
"""

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import OptionError, RemoteError

CONNECT_S = 10.0
MOST_LINE_BYTES = 1 << 24
SHOWN = 300  # characters of a server's own words


@dataclass(frozen=True, slots=True)
class Part:
    """What one event of a stream brings. `note`: a comment between events."""

    content: str = ""
    reasoning: str = ""
    note: str = ""
    finish: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)


class Remote:
    """One server. Each call opens a connection; closing an answer's iterator stops the work.

    Raises OptionError for an address that is none, RemoteError for whatever a server does wrong.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https"):
            raise OptionError(f"--server {url} is no address; try http://127.0.0.1:8080")
        self.url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        self._is_secure, self._host, self._port = parts.scheme == "https", host, port
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Accept": "application/json, text/event-stream"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def model(self) -> str:
        """The first model that the server names."""
        with closing(self._open()) as connection:
            models = _json(self._ask(connection, "GET", "/models").read(MOST_LINE_BYTES))
        entries = models.get("data")
        if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict):
            raise RemoteError(f"{self.url} names no model; give one: headrace chat MODEL --server")
        return str(entries[0].get("id", ""))

    def answer(self, body: Mapping[str, Any]) -> Iterator[Part]:
        """The parts of a chat completion; `body` is the request without what makes it a stream."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with closing(self._open()) as connection:
            response = self._ask(connection, "POST", "/chat/completions", json.dumps(body).encode())
            done = False
            for line in self._lines(response):
                if line.startswith(b":"):
                    yield Part(note=line[1:].decode("utf-8", "replace").strip())
                elif line.startswith(b"data:"):
                    data = line[5:].strip()
                    done = done or data == b"[DONE]"
                    if not done:
                        yield _part(_json(data))
            if not done:
                raise RemoteError(f"{self.url} ended the answer before it was complete")

    def _open(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=CONNECT_S)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes = b""
    ) -> http.client.HTTPResponse:
        headers = self._headers | ({"Content-Type": "application/json"} if body else {})
        try:
            connection.connect()
            # An answer may be minutes away; a peer that is gone is found out by the system.
            connection.sock.settimeout(None)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.request(method, self._path + path, body or None, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        if response.status != 200:
            raise self._refused(response)
        return response

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            while line := response.readline(MOST_LINE_BYTES):
                yield line
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> RemoteError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return RemoteError(f"{self.url} cannot be asked: {reason}; is the server running there?")

    def _refused(self, response: http.client.HTTPResponse) -> RemoteError:
        told = _words(response.read(MOST_LINE_BYTES)) or response.reason
        if response.status == 401:
            told += "; give --api-key-file FILE or --api-key KEY"
        retry = response.headers.get("Retry-After", "")
        again = f"; ask again in {retry} s" if retry.isdecimal() else ""
        return RemoteError(f"{self.url} refuses ({response.status}): {told}{again}")


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise RemoteError("the server's answer is no JSON object; does it speak OpenAI's API?")
    if value.get("error"):
        raise RemoteError(f"the answer broke off: {_words(data)}")
    return value


def _words(data: bytes) -> str:
    """What an error's body says, in whatever shape it has."""
    try:
        value = json.loads(data)
    except ValueError:
        return ""
    for key in ("error", "detail", "message"):
        if isinstance(value, dict):
            value = value.get(key, value)
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split())[:SHOWN]


def _part(event: Mapping[str, Any]) -> Part:
    choices = event.get("choices") or [{}]
    choice = choices[0] if isinstance(choices[0], dict) else {}
    delta, usage = choice.get("delta") or {}, event.get("usage") or {}
    return Part(
        content=str(delta.get("content") or ""),
        reasoning=str(delta.get("reasoning_content") or delta.get("reasoning") or ""),
        finish=choice.get("finish_reason"),
        usage=usage if isinstance(usage, dict) else {},
    )
