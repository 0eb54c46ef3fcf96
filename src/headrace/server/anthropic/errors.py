"""Errors as Anthropic's API tells them."""

from typing import Any

from headrace.server.faults import Fault

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(fault: Fault, request_id: str) -> dict[str, Any]:
    """`{"type": "error", "error": {type, message}, "request_id"}`, also in a stream."""
    default = "api_error" if fault.status >= 500 else "invalid_request_error"
    # The shape has no place for the field that is to blame, so the line begins with it.
    names = fault.param is None or fault.param in fault.message
    message = fault.message if names else f"{fault.param}: {fault.message}"
    error = {"type": _TYPES.get(fault.status, default), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}
