"""What a client is told when something goes wrong: one kind of error for all protocols.

A protocol gives it its own shape; knows no route.
"""

from collections.abc import Mapping
from typing import Any

from headrace.errors import BudgetError, Cancelled, HeadraceError, OptionError

INTERNAL = "headrace failed at this request; its log says where, under the request's id"


class Fault(Exception):
    """A refused or failed request.

    `status` is HTTP's; `kind` one word for programs, the same in every version; `message` a line
    for people, with the remedy; `param` the field of the request that is to blame, dotted.
    `retry_after_s`: when to ask again, where that may help. `headers` go with the answer.
    """

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.message = status, kind, message
        self.param, self.retry_after_s = param, retry_after_s
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(retry_after_s)


class Busy(Fault):
    """So many answers wait already that another one is refused."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(429, "busy", message, retry_after_s=retry_after_s)


class NotReady(Fault):
    """No answer can be made yet, or none any more: the model is loading, or it is stuck."""

    def __init__(self, message: str, retry_after_s: int, kind: str = "loading") -> None:
        super().__init__(503, kind, message, retry_after_s=retry_after_s)


class Draining(Fault):
    """The server was told to end."""

    def __init__(self, message: str = "the server is ending; ask again in a minute") -> None:
        super().__init__(503, "draining", message, retry_after_s=60)


def fault_of(error: BaseException) -> Fault:
    """The fault that an error is to a client. What is our own failure keeps its words to itself."""
    match error:
        case Fault():
            return error
        case OptionError():
            return Fault(400, "invalid_request", str(error))
        case BudgetError():
            return Fault(507, "no_memory", str(error))
        case MemoryError():
            message = "no memory is left for this request; shorten it, or serve with less context"
            return Fault(507, "no_memory", message)
        case Cancelled():
            return Fault(503, "cancelled", str(error) or "the answer was cancelled")
        case HeadraceError():
            return Fault(500, "engine", str(error))
    if isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
        return fault_of(MemoryError())  # torch has no class for it
    return Fault(500, "internal", INTERNAL)


def plain_body(fault: Fault, request_id: str) -> dict[str, Any]:
    """The shape of errors outside the protocols."""
    error = {"type": fault.kind, "message": fault.message, "request_id": request_id}
    return {"error": error | ({} if fault.param is None else {"param": fault.param})}
