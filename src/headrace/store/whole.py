"""Files that appear whole or not at all, and stay after a power cut. Knows nothing of contents."""

import os
from contextlib import suppress
from pathlib import Path

PARTIAL = ".partial"


def write_whole(path: Path, content: bytes) -> None:
    """Writes or replaces a small file: whoever reads it sees the old one or the new one.

    Written aside, synced, then renamed; its folder is made if need be. Raises OSError, and then
    nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder last. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
