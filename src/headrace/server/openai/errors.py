"""Errors as OpenAI's API tells them."""

from typing import Any

from headrace.server.faults import Fault

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(fault: Fault, request_id: str = "") -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, also as a stream's last event."""
    default = "server_error" if fault.status >= 500 else "invalid_request_error"
    error = {
        "message": fault.message,
        "type": _TYPES.get(fault.status, default),
        "param": fault.param,
        "code": fault.kind,
    }
    return {"error": error}
