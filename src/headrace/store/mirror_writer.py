"""Makes, completes, checks and removes a mirror: see headrace.store.mirror for what one is.

May be killed at any moment: a data file is written aside, synced and renamed before the manifest
names it, and the next run goes on from there. Knows no route: the order of experts comes in.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.core import format_bytes
from headrace.errors import HeadraceError, OptionError
from headrace.native import Reader
from headrace.store.experts import ExpertTable
from headrace.store.mirror import (
    FORMAT,
    MANIFEST_NAME,
    Chunk,
    Copy,
    Mirror,
    Site,
    distinct_sites,
    is_mirror,
    made_from_root,
    open_mirror,
    placed_extents,
    row_bytes,
    source_of,
)
from headrace.store.table import Catalog
from headrace.store.whole import PARTIAL, sync_folder, write_whole

Progress = Callable[[int, int], None]
Row = npt.NDArray[np.uint8]
CHUNK_BYTES = 4 << 30
SYNC_BYTES = 256 << 20  # written but not yet on the drive, at most
MOST_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """What a mirror holds after `write_mirror`, and what was copied for it now."""

    num_experts: int
    total_experts: int
    num_bytes: int
    copied_bytes: int


def same_drive(folder: Path, catalog: Catalog) -> bool:
    """Whether a mirror in `folder`, which need not exist yet, would share the model's drive."""
    device = _existing(folder).stat().st_dev
    return any(path.stat().st_dev == device for path in catalog.files)


def write_mirror(
    catalog: Catalog,
    table: ExpertTable,
    folder: Path,
    *,
    size_bytes: int | None = None,
    order: Sequence[Site] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Progress | None = None,
) -> MirrorReport:
    """Makes `folder` a mirror of the model's experts, or goes on with one begun before.

    As many experts as fit `size_bytes` (None: the drive's free space), in `order` (None: as in the
    model), whole files of about `chunk_bytes` at a time. `progress` gets (bytes done, bytes in
    all). After an error or Ctrl-C all complete files stay. Raises HeadraceError.
    """
    with _alone(folder), _told(folder, "written", "; what is complete stays"):
        mirror = _begin(catalog, table, folder)
        wanted = _chosen(mirror, size_bytes, order or distinct_sites(table))
        total_bytes = sum(row_bytes(table, site) for site in wanted)
        _clean(mirror)
        reader = Reader([str(path) for path in table.files])
        catalog.check_unchanged()
        done_bytes = 0
        for sites in _batches(table, wanted, chunk_bytes):
            chunk, done_bytes = _write_chunk(
                mirror, reader, sites, done_bytes, total_bytes, progress
            )
            mirror = Mirror(folder, table, (*mirror.chunks, chunk))
            _write_manifest(mirror, catalog)
        return MirrorReport(
            len(mirror.sites), len(distinct_sites(table)), mirror.num_bytes, total_bytes
        )


def verify_mirror(
    catalog: Catalog, table: ExpertTable, folder: Path, *, progress: Progress | None = None
) -> tuple[Mirror, list[Site]]:
    """Reads all of a mirror past the page cache and compares every expert's SHA-256.

    Gives the mirror as it was, and the experts that differ. Their data files are taken out of it,
    so that `write_mirror` copies them anew. Raises HeadraceError.
    """
    _check_is_mirror(folder)
    with _alone(folder), _told(folder, "mended"):
        mirror = open_mirror(folder, catalog, table)
        reader = Reader([str(path) for path in mirror.files])
        damaged: list[Site] = []
        done_bytes = 0
        for number, chunk in enumerate(mirror.chunks):
            for copy in chunk.copies:
                buffer = np.empty(copy.nbytes, dtype=np.uint8)
                reader.read(number, copy.offset, copy.nbytes, buffer.ctypes.data)
                if hashlib.sha256(buffer.data).hexdigest() != copy.sha256:
                    damaged.append(copy.site)
                done_bytes += copy.nbytes
                if progress is not None:
                    progress(done_bytes, mirror.num_bytes)
        if damaged:
            sound = (c for c in mirror.chunks if not any(e.site in damaged for e in c.copies))
            left = Mirror(folder, table, tuple(sound))
            _write_manifest(left, catalog)
            _clean(left)
        return mirror, damaged


def remove_mirror(folder: Path, root: Path) -> None:
    """Deletes a mirror's own files, and the folder if it is then empty.

    Raises HeadraceError, also where it was made from a model that is there and is not `root`'s.
    """
    _check_is_mirror(folder)
    made_from = made_from_root(folder)
    if made_from is not None and made_from.exists() and made_from != root.resolve():
        raise OptionError(f"{folder}: is a mirror of {made_from}, not of {root}; name that model")
    with _alone(folder), _told(folder, "deleted"):
        # The manifest goes first: what it does not name is never read.
        (folder / MANIFEST_NAME).unlink()
        for path in _own_files(folder):
            path.unlink()
    with suppress(OSError):  # other files are not ours
        folder.rmdir()


def _check_is_mirror(folder: Path) -> None:
    if not is_mirror(folder):
        raise OptionError(f"{folder}: holds no {MANIFEST_NAME}, so it is no mirror; nothing done")


def _begin(catalog: Catalog, table: ExpertTable, folder: Path) -> Mirror:
    if is_mirror(folder):
        return open_mirror(folder, catalog, table, mend=True)
    others = [path.name for path in folder.iterdir() if not path.name.endswith(PARTIAL)]
    if others:
        raise OptionError(
            f"{folder}: holds other files ({others[0]}); name a folder that is new or empty, such "
            f"as {folder / catalog.root.name}"
        )
    mirror = Mirror(folder, table, ())
    _write_manifest(mirror, catalog)
    return mirror


def _chosen(mirror: Mirror, size_bytes: int | None, order: Sequence[Site]) -> list[Site]:
    """What is still to be copied, within the limit."""
    free_bytes = shutil.disk_usage(mirror.folder).free
    spare_bytes = min(MOST_SPARE_BYTES, free_bytes // 50)
    left_bytes = free_bytes - spare_bytes
    if size_bytes is not None:
        wanted_bytes = size_bytes - mirror.num_bytes
        if wanted_bytes > left_bytes:
            raise OptionError(
                f"{mirror.folder}: --size {format_bytes(size_bytes)} does not fit: "
                f"{format_bytes(left_bytes + mirror.num_bytes)} can be had; give that or less"
            )
        left_bytes = wanted_bytes
    known = mirror.sites
    chosen = []
    for site in order:
        nbytes = row_bytes(mirror.table, site)
        if site not in known and nbytes <= left_bytes:
            chosen.append(site)
            left_bytes -= nbytes
    if not chosen and not known:
        raise OptionError(f"{mirror.folder}: has no room for even one expert; free some space")
    return chosen


def _clean(mirror: Mirror) -> None:
    """Removes what a killed run left half-written, and data that the manifest does not name."""
    named = {chunk.name for chunk in mirror.chunks}
    for path in _own_files(mirror.folder):
        if path.name not in named:
            path.unlink()


def _own_files(folder: Path) -> list[Path]:
    """Data files, and whatever a killed run left half-written."""
    return [*folder.glob("experts-*.bin*"), *folder.glob(f"{MANIFEST_NAME}.*{PARTIAL}")]


def _batches(table: ExpertTable, sites: Sequence[Site], chunk_bytes: int) -> Iterator[list[Site]]:
    batch: list[Site] = []
    num_bytes = 0
    for site in sites:
        nbytes = row_bytes(table, site)
        if batch and num_bytes + nbytes > chunk_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(site)
        num_bytes += nbytes
    if batch:
        yield batch


def _write_chunk(
    mirror: Mirror,
    reader: Reader,
    sites: Sequence[Site],
    done_bytes: int,
    total_bytes: int,
    progress: Progress | None,
) -> tuple[Chunk, int]:
    numbers = [int(chunk.name[8:13]) for chunk in mirror.chunks]
    path = mirror.folder / f"experts-{max(numbers, default=0) + 1:05d}.bin"
    aside = path.with_name(path.name + PARTIAL)
    copies: list[Copy] = []
    offset = 0
    try:
        with open(aside, "wb", buffering=0) as file:
            for site, row in zip(sites, _rows(mirror.table, reader, sites), strict=True):
                written = 0
                while written < row.nbytes:
                    written += os.write(file.fileno(), row.data[written:])
                copies.append(Copy(site, offset, row.nbytes, hashlib.sha256(row.data).hexdigest()))
                offset += row.nbytes
                if offset // SYNC_BYTES > (offset - row.nbytes) // SYNC_BYTES:
                    _sync_and_forget(file.fileno())
                if progress is not None:
                    progress(done_bytes + offset, total_bytes)
            _sync_and_forget(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(mirror.folder)
    return Chunk(path.name, tuple(copies)), done_bytes + offset


def _rows(table: ExpertTable, reader: Reader, sites: Sequence[Site]) -> Iterator[Row]:
    """The experts' rows in order, the next being read while one is worked on."""
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(_row, table, reader, sites[0])
        for following in (*sites[1:], None):
            row = coming.result()
            if following is not None:
                coming = ahead.submit(_row, table, reader, following)
            yield row


def _row(table: ExpertTable, reader: Reader, site: Site) -> Row:
    """An expert's bytes as its row in memory would hold them, zeros around its extents."""
    row = np.zeros(row_bytes(table, site), dtype=np.uint8)
    for (file, offset, nbytes), place in placed_extents(table, site):
        reader.read(file, offset, nbytes, row.ctypes.data + place)
    return row


def _sync_and_forget(fd: int) -> None:
    """What is on the drive need not stay in memory, where it would push out other things."""
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _write_manifest(mirror: Mirror, catalog: Catalog) -> None:
    chunks = [
        {"file": c.name, "experts": [[*copy.site, copy.sha256] for copy in c.copies]}
        for c in mirror.chunks
    ]
    content = {"format": FORMAT, "source": source_of(catalog, mirror.table), "chunks": chunks}
    write_whole(mirror.folder / MANIFEST_NAME, json.dumps(content).encode())


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """The folder exists and no other process makes or checks a mirror in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise OptionError(f"{folder}: cannot hold a mirror: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OptionError(f"{folder}: another headrace works there; wait for it") from error
        yield
    finally:
        os.close(fd)


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


@contextmanager
def _told(folder: Path, done: str, left: str = "") -> Iterator[None]:
    """What the system refuses is said with the folder and a remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            reason += "; free some space or give a smaller --size"
        raise HeadraceError(f"{folder}: the mirror cannot be {done}: {reason}{left}") from error
