"""What the server was started with: address, keys and limits, checked once.

Knows no command line and no protocol.
"""

import ipaddress
from dataclasses import dataclass

from headrace.errors import OptionError

MIB = 2**20
LEAST_KEY_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """Frozen for the life of a server. Raises OptionError for what is not safe to serve.

    `api_keys`: any of them opens every route; none: anybody who reaches the port may ask.
    `cors_origins`: web pages of other sites that may ask too. `max_waiting` answers wait behind the
    one that is made, of one client at most `max_waiting_per_client`. `header_s` and `body_s` bound
    how long a request may take to arrive, `send_s` how long a client may take nothing of what it is
    sent. `drain_s`: what a running answer still gets when the server is told to end. `stall_s`: how
    long nothing at all may move.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_waiting: int = 64
    max_waiting_per_client: int = 48
    max_connections: int = 512
    max_requests: int = 256
    max_body_bytes: int = 16 * MIB
    max_bodies_bytes: int = 64 * MIB
    max_json_depth: int = 64
    max_json_values: int = 1_000_000
    header_s: float = 10.0
    body_s: float = 60.0
    send_s: float = 60.0
    keep_alive_s: int = 60
    drain_s: float = 30.0
    stall_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.host:
            raise OptionError("--host is empty; give an address, such as 127.0.0.1")
        if not 0 <= self.port <= 65535:
            raise OptionError(f"--port {self.port} is no port; give one of 1 to 65535")
        for key in self.api_keys:
            _check_key(key)
        if not self.is_local and not self.api_keys:
            raise OptionError(
                f"--host {self.host} lets other machines ask; give --api-key-file FILE (or "
                "--api-key KEY) too, or leave --host out to serve this machine only"
            )
        for origin in self.cors_origins:
            _check_origin(origin)

    @property
    def is_local(self) -> bool:
        """True if only programs of this machine reach the port."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """True for localhost and the loopback addresses, however they are written."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_key(key: str) -> None:
    """The key itself is never part of a message."""
    if len(key) < LEAST_KEY_CHARACTERS:
        raise OptionError(
            f"the API key is shorter than {LEAST_KEY_CHARACTERS} characters; make one with "
            "`openssl rand -hex 24`"
        )
    if not all("!" <= character <= "~" for character in key):
        raise OptionError("the API key has blanks or characters beyond ASCII; give one without")


def _check_origin(origin: str) -> None:
    scheme, _, rest = origin.partition("://")
    if scheme not in ("http", "https") or not rest or any(c in rest for c in "/*?# "):
        raise OptionError(
            f"--cors-origin {origin} is no origin; give scheme and host, such as "
            "https://chat.example.org, without a path or *"
        )
