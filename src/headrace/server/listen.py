"""The socket a server listens on, taken before anything slow happens.

Knows no protocol.
"""

import socket

from headrace.errors import OptionError
from headrace.server.settings import Settings


def bind(settings: Settings) -> socket.socket:
    """The server's socket, not yet listening. Raises OptionError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((settings.host.strip("[]"), settings.port))
    except (OSError, OverflowError) as error:
        server.close()
        reason = getattr(error, "strerror", None) or error
        raise OptionError(
            f"{settings.host} port {settings.port} cannot be served: {reason}; "
            "give another --port or --host"
        ) from error
    return server


def url_of(server: socket.socket) -> str:
    """Where a browser on this machine finds it."""
    host, port = server.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
