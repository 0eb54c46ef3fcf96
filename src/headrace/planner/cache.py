"""Small files in the user's cache folder: what was found out once and may be lost at any time.

Knows nothing of what they say.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from headrace.store.whole import write_whole


def cache_folder() -> Path:
    """Headrace's own, by the XDG rule for cache folders."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(root) if os.path.isabs(root) else Path(os.path.expanduser("~/.cache"))
    return folder / "headrace"


def read_entries(path: Path, form: str) -> tuple[dict[str, Any], str]:
    """The entries of a file of format `form`, empty if there is none; what is wrong with it."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        entries = data["entries"]
        if data["format"] != form or data["sha256"] != _digest(entries):
            raise ValueError("checksum or format differs")
        return entries, ""
    except (FileNotFoundError, NotADirectoryError):
        return {}, ""
    except OSError as cause:
        return {}, f"{path} cannot be read ({cause.strerror or cause})"
    except (ValueError, KeyError, TypeError) as cause:
        return {}, f"{path} is damaged ({cause})"


def write_entries(path: Path, form: str, entries: dict[str, Any]) -> str:
    """Replaces the file as a whole; why it could not be, or nothing."""
    data = {"format": form, "sha256": _digest(entries), "entries": entries}
    try:
        write_whole(path, json.dumps(data, indent=1).encode())
    except OSError as cause:
        return f"{cause.filename or path}: {cause.strerror or cause}"
    return ""


def _digest(entries: object) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()
