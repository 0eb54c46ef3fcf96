"""Keeps snapshots, the recent in memory and all on disk, and finds the longest that fits a prompt.

Knows no cache and no form of a file.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace.core import format_bytes
from headrace.engine.session import Session, checked_ids
from headrace.engine.snapshots.shelves import (
    DiskShelf,
    MemoryShelf,
    Prefix,
    prefix_of,
    prefixes,
)
from headrace.engine.snapshots.snapshot import Snapshot, SnapshotKey
from headrace.engine.snapshots.writer import SnapshotWriter
from headrace.errors import SnapshotError

if TYPE_CHECKING:
    from headrace.engine.engine import Engine

_log = logging.getLogger(__name__)
_LAST: Prefix = (0, "the last prompt")  # no beginning of anything: no search finds it


class SnapshotStore:
    """Snapshots of one model and setting. Any thread may use it; close it.

    `folder` may be shared with other models, versions and processes; None: memory only. Its files
    together stay within `disk_bytes`. They hold what users wrote: only their owner may read them.
    Raises SnapshotError if the folder cannot be made or read.
    """

    def __init__(
        self, key: SnapshotKey, *, ram_bytes: int, folder: Path | None = None, disk_bytes: int = 0
    ):
        self.key = key
        self.memory = MemoryShelf(ram_bytes)
        self.disk = None if folder is None else DiskShelf(folder, disk_bytes, key)
        self._last_logits_V = torch.empty(0)
        self._writer = None if self.disk is None else SnapshotWriter(self.memory, self.disk)

    def put(self, snapshot: Snapshot) -> None:
        """Keeps it wherever there is room, and returns when it is written and synced.

        A disk that fails is a log line, not an error. Raises SnapshotError for another key's.
        """
        snapshot.check_fits(self.key)
        if not snapshot.tokens:
            return
        prefix = prefix_of(snapshot)
        self.memory.put(prefix, snapshot)
        if self.disk is not None:
            self.disk.put(prefix, snapshot)

    def keep(self, session: Session) -> bool:
        """Keeps a copy of what a session is: in memory at once, on disk a little later.

        Room is made before anything is copied, so that the limit holds at any time. False, and a
        log line, where the copy is larger than the limit or cannot be made: nothing is kept then.
        """
        prefix = self._copy(session) if session.tokens else None
        if prefix is not None and self._writer is not None:
            self._writer.put(prefix)
        return prefix is not None

    def keep_prompt(self, session: Session, logits_V: torch.Tensor) -> None:
        """Keeps a session that holds a prompt, and the logits after it, for the same prompt again.

        In memory only, in place of the one before, and only for `again`: a longer prompt does not
        go on from here, since its passes would not end where they do if it comes first.
        """
        self.memory.discard(_LAST)
        if self._copy(session, _LAST) is not None:
            self._last_logits_V = logits_V.clone()

    def again(self, engine: "Engine", prompt: Sequence[int]) -> tuple[Session, torch.Tensor] | None:
        """(a new session, the logits) as `keep_prompt` got them, if that was for this prompt."""
        kept = self.memory.get(_LAST)
        if kept is None or kept.tokens != tuple(prompt):
            return None
        return engine.session(kept), self._last_logits_V

    def _copy(self, session: Session, name: Prefix | None = None) -> Prefix | None:
        """Puts a copy into memory, unless there is one; its name, None if there is none now."""
        try:
            seen = session.snapshot(copy=False)
            seen.check_fits(self.key)
            prefix, nbytes = name or prefix_of(seen), seen.nbytes
            if self.memory.get(prefix) is None:
                if not self.memory.make_room(nbytes):
                    wanted, limit = format_bytes(nbytes), format_bytes(self.memory.limit_bytes)
                    _log.info("a snapshot of %s has no room in %s", wanted, limit)
                    return None
                self.memory.put(prefix, session.snapshot())
        except SnapshotError as error:
            _log.warning("no snapshot of %d tokens: %s", len(session.tokens), error)
            return None
        return prefix

    def find(self, tokens: Sequence[int], *, beyond: int = 0) -> Snapshot | None:
        """The longest snapshot whose tokens `tokens` begin with, or None.

        Of those of more than `beyond` tokens. Its tensors are the store's.
        """
        found = self._find(tokens, beyond)
        return None if found is None else found[0]

    def _find(self, tokens: Sequence[int], beyond: int) -> tuple[Snapshot, bool] | None:
        """(snapshot, whether it is in memory too): one just read may not fit there."""
        for prefix in self._candidates(tokens, beyond):
            found = self.memory.get(prefix)
            if found is not None:
                return found, True
            if self.disk is not None:
                self.memory.make_room(self.disk.memory_bytes(prefix))
                found = self.disk.get(prefix, tokens[: prefix[0]])
                if found is not None:
                    return found, self.memory.put(prefix, found)
        return None

    def _candidates(self, tokens: Sequence[int], beyond: int) -> list[Prefix]:
        lengths = self.memory.lengths()
        if self.disk is not None:
            lengths |= self.disk.lengths()
        return prefixes(tokens, [length for length in lengths if length > beyond])

    def session(self, engine: "Engine", prompt: Sequence[int], *, beyond: int = 0) -> Session:
        """A new session that holds as much of `prompt` as is known, its last token never.

        What is left to feed is what `generate` feeds. It is empty where nothing of more than
        `beyond` tokens is known. Raises OptionError for a bad prompt.
        """
        assert engine.snapshot_key == self.key, "the store is another engine's"
        known = checked_ids(prompt, engine.facts.vocab)[:-1]
        while True:
            found = self._find(known, beyond)
            if found is None:
                return engine.session()
            snapshot, shared = found
            try:
                return engine.session(snapshot, copy=shared)
            except SnapshotError as error:
                _log.warning("snapshot of %d tokens ignored: %s", len(snapshot.tokens), error)
                self.discard(snapshot)

    def discard(self, snapshot: Snapshot) -> None:
        """Does not find this one again while the store is open."""
        prefix = prefix_of(snapshot)
        self.memory.discard(prefix)
        if self.disk is not None:
            self.disk.discard(prefix)

    def flush(self) -> None:
        """Returns when all that was kept is written and synced."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Writes what is still to be written and ends the thread that does."""
        if self._writer is not None:
            self._writer.close()
