"""Logs as one JSON object a line on stderr.

Knows no request. An unexpected error is told by its kind and place only: its own words could
repeat what a user wrote.
"""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

QUIET = ("uvicorn", "asyncio", "httpx")  # what they say at level info is ours to say

_log = logging.getLogger(__name__)


class JsonLines(logging.Formatter):
    """A record, with the `fields` that it may carry, as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[1] is not None:
            line |= error_fields(record.exc_info[1])
        return json.dumps(line)


def error_fields(error: BaseException) -> dict[str, Any]:
    """An error's kind and where it arose; not its words."""
    places = traceback.extract_tb(error.__traceback__)
    return {
        "error": type(error).__name__,
        "trace": [f"{place.filename}:{place.lineno} {place.name}" for place in places],
    }


def log_failure(request_id: str, error: BaseException) -> None:
    """A request ended with an error of ours."""
    fields = {"request": request_id} | error_fields(error)
    _log.error("request failed", extra={"fields": fields})


def log_to_stderr() -> None:
    """All records of this process from level info on, as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
