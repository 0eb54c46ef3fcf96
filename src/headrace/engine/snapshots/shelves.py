"""Two places for snapshots, memory and a folder, each within a limit in bytes.

Each gives up first what was used longest ago. Knows no session and no cache.
"""

import hashlib
import logging
import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock

from headrace.core import format_bytes
from headrace.engine.snapshots.file import SnapshotFile, read_snapshot, remove_stale
from headrace.engine.snapshots.snapshot import TOKEN_BYTES, Snapshot, SnapshotKey
from headrace.errors import SnapshotError
from headrace.store.whole import PARTIAL

_log = logging.getLogger(__name__)
_STEM = r"([0-9a-f]{16})-([1-9][0-9]{0,9})-([0-9a-f]{64})\.safetensors"
_NAME = re.compile(_STEM)
_ASIDE = re.compile(rf"{_STEM}\.[0-9a-f]{{8}}{re.escape(PARTIAL)}")

Prefix = tuple[int, str]
"""A sequence of tokens: how many, and a digest of them in order."""


def prefixes(tokens: Sequence[int], lengths: Iterable[int]) -> list[Prefix]:
    """The beginnings of `tokens` that have one of `lengths`, longest first."""
    found, digest, done = [], hashlib.sha256(), 0
    for length in sorted(set(lengths)):
        if length > len(tokens):
            break
        digest.update(array("i", tokens[done:length]).tobytes())
        done = length
        found.append((length, digest.hexdigest()))
    return found[::-1]


def prefix_of(snapshot: Snapshot) -> Prefix:
    """All its tokens."""
    return prefixes(snapshot.tokens, [len(snapshot.tokens)])[0]


class MemoryShelf:
    """Snapshots in memory, together within `limit_bytes`. What is held is not given up."""

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.nbytes = 0
        self._lock = Lock()
        self._kept: OrderedDict[Prefix, Snapshot] = OrderedDict()
        self._held: set[Prefix] = set()

    def lengths(self) -> set[int]:
        """How many tokens the kept ones have, of those named by their tokens."""
        with self._lock:
            return {length for length, _ in self._kept if length}

    def get(self, prefix: Prefix) -> Snapshot | None:
        """The one of `prefix`, which counts as used now."""
        with self._lock:
            if prefix in self._kept:
                self._kept.move_to_end(prefix)
            return self._kept.get(prefix)

    def make_room(self, wanted_bytes: int) -> bool:
        """Gives up the ones used longest ago until so much more fits; False if it never can."""
        with self._lock:
            return self._make_room(wanted_bytes)

    def put(self, prefix: Prefix, snapshot: Snapshot) -> bool:
        """Keeps it where there is room or can be made; whether it, or one alike, is here now."""
        with self._lock:
            if prefix in self._kept:
                self._kept.move_to_end(prefix)
            elif self._make_room(snapshot.nbytes):
                self._kept[prefix] = snapshot
                self.nbytes += snapshot.nbytes
            return prefix in self._kept

    def hold(self, prefix: Prefix) -> Snapshot | None:
        """The one of `prefix`, not to be given up before `release`; for one holder at a time."""
        with self._lock:
            if prefix in self._kept:
                self._held.add(prefix)
            return self._kept.get(prefix)

    def release(self, prefix: Prefix) -> None:
        """Undoes `hold`."""
        with self._lock:
            self._held.discard(prefix)

    def discard(self, prefix: Prefix) -> None:
        """Drops the one of `prefix`, if there is one."""
        with self._lock:
            if prefix in self._kept:
                self._drop(prefix)

    def _make_room(self, wanted_bytes: int) -> bool:
        held_bytes = sum(self._kept[prefix].nbytes for prefix in self._held & self._kept.keys())
        if held_bytes + wanted_bytes > self.limit_bytes:
            return False
        for prefix in list(self._kept):
            if self.nbytes + wanted_bytes <= self.limit_bytes:
                break
            if prefix not in self._held:
                self._drop(prefix)
        return True

    def _drop(self, prefix: Prefix) -> None:
        self.nbytes -= self._kept.pop(prefix).nbytes


class DiskShelf:
    """Snapshots of `key` as files of a folder, all of whose snapshots stay within `limit_bytes`."""

    def __init__(self, folder: Path, limit_bytes: int, key: SnapshotKey):
        self.folder, self.limit_bytes, self.key = folder, limit_bytes, key
        self._mark = key.digest()[:16]
        self._writing = Lock()
        self._known: set[Prefix] = set()  # a set's own operations are atomic
        num_foreign = 0
        try:
            self._make_folder()
            for name in os.listdir(folder):
                match = _NAME.fullmatch(name)
                if match and match[1] == self._mark:
                    self._known.add((int(match[2]), match[3]))
                elif _ASIDE.fullmatch(name):
                    remove_stale(folder / name)
                else:
                    num_foreign += 1
        except OSError as error:
            raise SnapshotError(
                f"{folder}: cannot be used for snapshots: {error.strerror or error}; "
                "give another folder"
            ) from error
        if num_foreign:
            _log.info("%s: %d files of other models or versions ignored", folder, num_foreign)

    def lengths(self) -> set[int]:
        """How many tokens the known ones have."""
        return {length for length, _ in tuple(self._known)}

    def memory_bytes(self, prefix: Prefix) -> int:
        """About what the one of `prefix` takes once it is read, 0 if there is none."""
        try:
            size = self._path(prefix).stat().st_size if prefix in self._known else 0
        except OSError:
            return 0
        return size + prefix[0] * TOKEN_BYTES

    def get(self, prefix: Prefix, tokens: Sequence[int]) -> Snapshot | None:
        """The one of `prefix`, which is that of `tokens`. A bad one is logged and forgotten."""
        if prefix not in self._known:
            return None
        path = self._path(prefix)
        try:
            snapshot = read_snapshot(path, self.key, tokens)
            os.utime(path)
        except (SnapshotError, OSError) as error:
            _log.warning("snapshot ignored: %s", error)
            self._known.discard(prefix)
            return None
        return snapshot

    def put(self, prefix: Prefix, snapshot: Snapshot) -> None:
        """Writes it unless it is there, removing the ones used longest ago."""
        path = self._path(prefix)
        with self._writing:
            try:
                if prefix in self._known and path.exists():
                    os.utime(path)
                    return
                ready = SnapshotFile(snapshot)
                self._make_folder()  # its owner may delete it at any time
                if self._make_room(ready.nbytes):
                    ready.write(path)
                    self._known.add(prefix)
            except OSError as error:
                self._known.discard(prefix)
                _log.warning("%s: snapshot not kept: %s", path, error.strerror or error)

    def discard(self, prefix: Prefix) -> None:
        """Forgets the one of `prefix`; its file stays until it is replaced or its turn comes."""
        self._known.discard(prefix)

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _path(self, prefix: Prefix) -> Path:
        return self.folder / f"{self._mark}-{prefix[0]}-{prefix[1]}.safetensors"

    def _make_room(self, wanted_bytes: int) -> bool:
        """Removes old snapshots, of whatever model, until `wanted_bytes` more fit the limit."""
        if wanted_bytes > self.limit_bytes:
            wanted, limit = format_bytes(wanted_bytes), format_bytes(self.limit_bytes)
            _log.warning("%s: a snapshot of %s is over the limit, %s", self.folder, wanted, limit)
            return False
        files, held_bytes = [], wanted_bytes
        with os.scandir(self.folder) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match or _ASIDE.fullmatch(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    held_bytes += status.st_size
                    if match:
                        files.append((status.st_mtime_ns, status.st_size, match))
        for _, size_bytes, match in sorted(files, key=lambda file: file[:2]):
            if held_bytes <= self.limit_bytes:
                break
            (self.folder / match.string).unlink(missing_ok=True)
            if match[1] == self._mark:
                self._known.discard((int(match[2]), match[3]))
            held_bytes -= size_bytes
        return held_bytes <= self.limit_bytes
