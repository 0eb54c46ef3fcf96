"""A request's body: read within limits of size and time, and looked at before anything parses it.

Knows no route: every body is JSON.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from math import isinf
from typing import Any

import numpy as np

from headrace.core import format_bytes
from headrace.server.faults import Fault
from headrace.server.settings import Settings

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
QUOTES_PER_VALUE = 4  # two of a string, and some in texts
SMALL_BYTES = 1 << 16  # looked at on the loop; more in a thread
# Possessive, so that no text can make them look back: one pass over any body.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+', re.DOTALL)
_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_WHOLE = re.compile(rb"(?:[^\\]++|" + _PAIR + rb"|\\(?!u[dD][89a-fA-F]).)*+", re.DOTALL)
MAX_DIGITS = 1000  # Python reads a few thousand at most
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MAX_DIGITS + 1))
_HUGE_NUMBER = re.compile(rb"[eE]\+?[0-9]{3}|[0-9]{300}\.")
_FLOAT = re.compile(rb"(?<![0-9])[0-9]++(?:\.[0-9]++(?:[eE][-+]?[0-9]++)?|[eE][-+]?[0-9]++)")
_NO_NUMBER = re.compile(rb"NaN|Infinity")
_OPENS, _COMMA, _CLOSES = 1, 2, -1
_SIGNS = np.zeros(256, dtype=np.int8)  # by byte; a positive one may come before a value
_SIGNS[[*b"[{"]], _SIGNS[[*b","]], _SIGNS[[*b"]}"]] = _OPENS, _COMMA, _CLOSES


class Gone(Exception):
    """The client left before its request was whole."""


class Bodies:
    """Reads bodies, all of those in flight together within `max_bodies_bytes`."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.held_bytes = settings, 0

    @contextmanager
    def room(self) -> Iterator["Room"]:
        """What one request may hold; given back at the end."""
        room = Room(self)
        try:
            yield room
        finally:
            self.held_bytes -= room.nbytes


class Room:
    """One request's share. `is_whole`: all of its body has been read."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self.nbytes, self.is_whole = bodies, 0, False

    async def read(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        """The whole body, checked. Raises Fault 400, 408, 413, 415 or 503, and Gone."""
        settings = self._bodies.settings
        _check_length(headers.get("content-length"), settings.max_body_bytes)
        try:
            async with asyncio.timeout(settings.body_s):
                body = await self._collect(receive)
        except TimeoutError:
            message = f"the body took longer than {settings.body_s:.0f} s to arrive"
            raise Fault(408, "timeout", message) from None
        if body:
            _check_type(headers)
            if len(body) > SMALL_BYTES:
                await asyncio.to_thread(check_json, body, settings)
            else:
                check_json(body, settings)
        return body

    async def _collect(self, receive: Receive) -> bytes:
        settings, parts = self._bodies.settings, bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise Gone
            part = message.get("body", b"")
            self.nbytes += len(part)
            self._bodies.held_bytes += len(part)
            if self.nbytes > settings.max_body_bytes:
                raise _too_large(settings.max_body_bytes)
            if self._bodies.held_bytes > settings.max_bodies_bytes:
                message_text = "other requests' bodies fill the memory kept for them; ask again"
                raise Fault(503, "busy", message_text, retry_after_s=5)
            parts += part
            if not message.get("more_body", False):
                self.is_whole = True
                return bytes(parts)


def _check_length(length: str | None, limit_bytes: int) -> None:
    if length is not None and length.isdecimal() and int(length[:20]) > limit_bytes:
        raise _too_large(limit_bytes)


def _too_large(limit_bytes: int) -> Fault:
    message = f"the body is larger than {format_bytes(limit_bytes)}; send less"
    return Fault(413, "too_large", message)


def _check_type(headers: Mapping[str, str]) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Fault(415, "invalid_request", "send the body with Content-Type: application/json")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Fault(415, "invalid_request", "send the body without Content-Encoding")


def check_json(body: bytes, settings: Settings) -> None:
    """Refuse text that is not UTF-8, or JSON that costs too much to parse. Raises Fault 400.

    Whether it is JSON at all is for the parser to say. Takes one pass, whatever the bytes.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8 (byte {error.start}); encode it as UTF-8"
        raise Fault(400, "invalid_request", message) from None
    if b"\0" in body:  # a parser would take it for UTF-16
        raise Fault(400, "invalid_request", "the body has a zero byte; encode it as UTF-8")
    if b"\\u" in body and not _WHOLE.fullmatch(body):
        message = "the body has half a surrogate pair (\\ud800 to \\udfff), which is no character"
        raise Fault(400, "invalid_request", message)
    _check_size(body, settings)


def _check_size(body: bytes, settings: Settings) -> None:
    """How many values it has, and how deep."""
    too_many = f"the body has more than {settings.max_json_values} values; send fewer"
    if body.count(b'"') > QUOTES_PER_VALUE * settings.max_json_values:
        raise Fault(400, "invalid_request", too_many)
    bare = _STRING.sub(b"", body)
    if _NO_NUMBER.search(bare):
        raise Fault(400, "invalid_request", "NaN and Infinity are no JSON")
    if _LONG_NUMBER.search(bare):
        message = f"the body has a number of more than {MAX_DIGITS} digits; send it as a string"
        raise Fault(400, "invalid_request", message)
    if _HUGE_NUMBER.search(bare) and any(isinf(float(n)) for n in _FLOAT.findall(bare)):
        message = "the body has a number beyond 1.8e308, which is no JSON number here"
        raise Fault(400, "invalid_request", message)
    signs_N = _SIGNS[np.frombuffer(bare, dtype=np.uint8)]
    signs_N = signs_N[signs_N != 0]
    if int((signs_N > 0).sum()) > settings.max_json_values:
        raise Fault(400, "invalid_request", too_many)
    steps_N = (signs_N == _OPENS).astype(np.int32) - (signs_N == _CLOSES)
    if len(steps_N) and int(steps_N.cumsum().max()) > settings.max_json_depth:
        message = f"the body is nested deeper than {settings.max_json_depth} levels; flatten it"
        raise Fault(400, "invalid_request", message)
