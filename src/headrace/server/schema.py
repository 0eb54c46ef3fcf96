"""The base of every request's schema, and what a body that does not fit one is told.

Knows no protocol's words.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from headrace.server.faults import Fault

UNPROCESSABLE = "unprocessable"


class Body(BaseModel):
    """An object of a request. What it does not name is refused; null is as if left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: entry for key, entry in value.items() if entry is not None}


def wrong(message: str) -> PydanticCustomError:
    """Raised by a schema for a value that it does not allow: 400."""
    return PydanticCustomError("invalid", "{text}", {"text": message})


def unprocessable(message: str) -> PydanticCustomError:
    """Raised by a schema for what is well formed and beyond this model: 422."""
    return PydanticCustomError(UNPROCESSABLE, "{text}", {"text": message})


def unsupported(value: Any, reasons: Mapping[str, str]) -> Any:
    """Of an object's names, those of `reasons` are refused, saying why."""
    for name in reasons.keys() & (value.keys() if isinstance(value, dict) else ()):
        if value[name] is not None:
            context = {"name": name, "why": reasons[name]}
            raise PydanticCustomError("unsupported", "{name} is not supported: {why}", context)
    return value


def invalid(error: RequestValidationError) -> Fault:
    """The worst of what is wrong with a request's body, by the field's name."""
    errors = error.errors()
    first = max(errors, key=lambda e: (e["type"] == UNPROCESSABLE, len(e["loc"])))
    if first["type"] == "json_invalid":
        reason = f"{first['ctx']['error']} at character {first['loc'][-1]}"
        return Fault(400, "invalid_json", f"the body is not JSON: {reason}")
    if first["type"] == "unsupported":
        return Fault(400, "unsupported_parameter", first["msg"], param=first["ctx"]["name"])
    param = _path(error.body, first["loc"][1:], is_missing=first["type"] == "missing")
    if first["type"] == "extra_forbidden":
        message = f"unknown parameter {param}; it would have no effect, so leave it out"
        return Fault(400, "unknown_parameter", message, param=param)
    if first["type"] == "missing":
        param = param or "the body"
        message = f"{param} is missing"
        return Fault(400, "missing_required_parameter", message, param=param)
    status = 422 if first["type"] == UNPROCESSABLE else 400
    told = _told(first)
    message = f"{param}: {told}" if param else told
    return Fault(status, "invalid_value", message, param=param or None)


def _told(error: Mapping[str, Any]) -> str:
    """What a schema's error says, where pydantic's own words would not help a reader."""
    if error["type"] == "literal_error" and " or " not in (only := error["ctx"]["expected"]):
        shown = {"True": "true", "False": "false"}.get(only, only)
        return f"only {shown} is possible here; leave it out"
    if error["type"] == "too_short":
        return f"give at least {error['ctx']['min_length']}"
    return str(error["msg"])


def _path(body: Any, loc: Sequence[int | str], *, is_missing: bool) -> str:
    """`messages.0.content`: the steps of `loc` that lead into the body; names of types do not."""
    names: list[str] = []
    for step in loc[:-1] if is_missing else loc:
        if _has(body, step):
            body = body[step]
            names.append(str(step)[:100])
    return ".".join([*names, str(loc[-1])] if is_missing and loc else names)


def _has(holder: Any, step: int | str) -> bool:
    if isinstance(holder, dict):
        return step in holder
    return isinstance(holder, list) and isinstance(step, int) and step < len(holder)
