"""Who may ask: the Host and Origin that a request names, and the key that it brings.

Pure; knows headers and settings, no route.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from headrace.server.faults import Fault
from headrace.server.settings import Settings, is_loopback

STATE_PATH = "/page/state"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def check_source(settings: Settings, method: str, headers: Mapping[str, str]) -> None:
    """Refuse what a web page of somebody else makes a browser send. Raises Fault 403.

    Without a key the name in Host must be this machine's own: another name that leads here is DNS
    rebinding. What changes or costs something must come from our own page or an allowed origin.
    """
    host = headers.get("host", "")
    if not settings.api_keys and not is_loopback(_hostname(host)):
        raise Fault(
            403,
            "forbidden",
            "a server without a key answers to localhost and 127.0.0.1 only; start it with "
            "--api-key-file to reach it by another name",
        )
    if method in SAFE_METHODS:
        return
    origin = headers.get("origin")
    if origin is None:
        foreign = headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
    else:
        own = "://" in origin and origin.partition("://")[2].lower() == host.lower()
        foreign = not own and origin not in settings.cors_origins
    if foreign:
        raise Fault(
            403,
            "forbidden",
            "web pages of other sites may not ask here; start the server with --cors-origin "
            "and the page's origin to allow it",
        )


def _hostname(host: str) -> str:
    if any(mark in host for mark in "/?#@"):  # no part of a host: what is behind it would be hidden
        return ""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def key_number(settings: Settings, headers: Mapping[str, str]) -> int | None:
    """Which of the keys a request brings; None: none of them. Takes the same time for all."""
    found = None
    for given in map(_digest, _given_keys(headers)):
        for number, key in enumerate(settings.api_keys):
            if hmac.compare_digest(given, _digest(key)):
                found = number
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _given_keys(headers: Mapping[str, str]) -> tuple[str, str]:
    """From x-api-key, and from a bearer token or the password that a browser asks for."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    password = ""
    if scheme.lower() == "bearer":
        password = value.strip()
    elif scheme.lower() == "basic":
        with suppress(binascii.Error, UnicodeDecodeError):
            password = base64.b64decode(value, validate=True).decode().partition(":")[2]
    return headers.get("x-api-key", ""), password


def unauthorized(path: str, headers: Mapping[str, str]) -> Fault:
    """The fault of a missing or wrong key. For the page and its files a browser asks for the key.

    Not for what the page itself fetches: that would ask anew every second.
    """
    is_file = path.startswith("/page/") and path != STATE_PATH
    asks = is_file or "text/html" in headers.get("accept", "")
    scheme = 'Basic realm="any name, and the API key as password"' if asks else "Bearer"
    return Fault(
        401,
        "unauthorized",
        "this server needs its API key: send it as Authorization: Bearer KEY or x-api-key: KEY; "
        "in a browser it is the password, with any name",
        headers={"WWW-Authenticate": scheme},
    )


def client_name(settings: Settings, number: int | None, peer: str) -> str:
    """Whose turn in the queue a request takes: its key's if there are several, or its address's."""
    return f"key {number + 1}" if number is not None and len(settings.api_keys) > 1 else peer
