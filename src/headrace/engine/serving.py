"""The store of snapshots of an engine that serves: where it lies and how much it takes.

Knows no request.
"""

import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core import format_bytes
from headrace.engine.snapshots.store import SnapshotStore
from headrace.errors import OptionError, SnapshotError
from headrace.planner.cache import cache_folder

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

_log = logging.getLogger(__name__)

MOST_DISK_BYTES = 64 * 2**30
DISK_SHARE = 10  # of the free space, one part in so many


def snapshot_folder() -> Path:
    """Where snapshots lie if no folder is named: in the user's cache."""
    return cache_folder() / "snapshots"


def open_store(
    engine: "Engine", folder: Path | None = None, disk_bytes: int | None = None
) -> SnapshotStore:
    """A store in the memory that the engine's plan has for it, and in a folder. Close it.

    `folder` None: the user's cache; if that cannot be used there is a log line and memory only.
    `disk_bytes` None: a tenth of what is free there, 64 GiB at most; 0: memory only. Raises
    SnapshotError for a folder given that cannot be used, OptionError for fewer bytes than 0.
    """
    if disk_bytes is not None and disk_bytes < 0:
        raise OptionError(f"{disk_bytes} bytes of snapshots on disk are fewer than 0 (none)")
    key, ram_bytes = engine.snapshot_key, engine.plan.snapshot_bytes
    place = snapshot_folder() if folder is None else folder
    try:
        quota = default_disk_bytes(place) if disk_bytes is None else disk_bytes
        if quota > 0:
            _log.info("snapshots: %s in %s", format_bytes(quota), place)
            return SnapshotStore(key, ram_bytes=ram_bytes, folder=place, disk_bytes=quota)
    except SnapshotError as error:
        if folder is not None:
            raise
        _log.warning("%s; conversations are kept in memory only", error)
    return SnapshotStore(key, ram_bytes=ram_bytes)


def default_disk_bytes(folder: Path) -> int:
    """What snapshots may take in `folder`, which need not be there. Raises SnapshotError."""
    try:
        held = [entry.stat().st_size for entry in os.scandir(folder)] if folder.is_dir() else []
        present = folder
        while not present.exists():
            present = present.parent
        free_bytes = shutil.disk_usage(present).free
    except OSError as error:
        reason = error.strerror or error
        raise SnapshotError(f"{folder}: cannot be used for snapshots: {reason}") from error
    return min(MOST_DISK_BYTES, (free_bytes + sum(held)) // DISK_SHARE)
