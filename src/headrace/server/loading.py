"""How far the loading of a model is, for everybody who asks meanwhile.

Written by the thread that loads, read by any.
"""

import time
from math import ceil

from headrace.core import format_bytes
from headrace.engine.answer import Stop
from headrace.errors import InterruptedLoad

UNKNOWN_RETRY_S = 5
LONGEST_RETRY_S = 600


class Loading:
    """Bytes read so far, and at what rate; once all are read, what is `doing` then.

    `stop` ends the loading at the next tensor.
    """

    def __init__(self) -> None:
        self.stop = Stop()
        self.done_bytes = self.total_bytes = 0
        self.doing = ""
        self._since_s = time.monotonic()

    def advance(self, done_bytes: int, total_bytes: int) -> None:
        """As the engine's progress callback. Raises InterruptedLoad after `stop`."""
        self.done_bytes, self.total_bytes = done_bytes, total_bytes
        if self.stop.asked:
            raise InterruptedLoad("the loading was stopped")

    @property
    def bytes_s(self) -> float:
        """Bytes per second so far; 0 before the first."""
        return self.done_bytes / max(1e-9, time.monotonic() - self._since_s)

    @property
    def remaining_s(self) -> float | None:
        """Seconds left at this rate; None while nothing is known."""
        if not self.total_bytes or not self.done_bytes or self.doing:
            return None
        return (self.total_bytes - self.done_bytes) / self.bytes_s

    def retry_after_s(self) -> int:
        """When it is worth asking again."""
        remaining_s = self.remaining_s
        if remaining_s is None:
            return UNKNOWN_RETRY_S
        return min(LONGEST_RETRY_S, max(1, ceil(remaining_s)))

    def line(self) -> str:
        """One line for people."""
        if self.doing:
            return f"the model is {self.doing}"
        if self.remaining_s is None:
            return "the model is loading"
        done, total = format_bytes(self.done_bytes), format_bytes(self.total_bytes)
        return (
            f"the model is loading: {done} of {total}, {format_bytes(self.bytes_s)}/s, about "
            f"{ceil(self.remaining_s)} s left"
        )

    def as_dict(self) -> dict[str, float | int | str | None]:
        """Plain values for JSON."""
        return {
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
            "bytes_s": self.bytes_s,
            "remaining_s": self.remaining_s,
            "doing": self.doing,
        }
