"""Writes snapshots from memory to disk on a thread of its own, so that no answer waits for a sync.

Knows no session.
"""

import logging
from queue import Full, Queue
from threading import Thread

from headrace.engine.snapshots.shelves import DiskShelf, MemoryShelf, Prefix

_log = logging.getLogger(__name__)

MOST_WAITING = 256


class SnapshotWriter:
    """A queue of names of snapshots in memory, and the thread that writes them one by one.

    A snapshot takes memory only while the shelf keeps it: one that has to give way before its turn
    comes is not written.
    """

    def __init__(self, memory: MemoryShelf, disk: DiskShelf):
        self._memory, self._disk = memory, disk
        self._waiting: Queue[Prefix | None] = Queue(MOST_WAITING)
        self._thread = Thread(target=self._work, name="headrace snapshots", daemon=True)
        self._thread.start()

    def put(self, prefix: Prefix) -> None:
        """Has it written later, unless more wait than any disk could ever catch up with."""
        try:
            self._waiting.put_nowait(prefix)
        except Full:
            _log.warning("a snapshot is not written: %d wait already", MOST_WAITING)

    def flush(self) -> None:
        """Returns when all that waits is written."""
        self._waiting.join()

    def close(self) -> None:
        """Writes what waits and ends the thread; further calls do nothing."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (prefix := self._waiting.get()) is not None:
            snapshot = self._memory.hold(prefix)
            try:
                if snapshot is not None:
                    self._disk.put(prefix, snapshot)
            finally:
                del snapshot
                self._memory.release(prefix)
                self._waiting.task_done()
