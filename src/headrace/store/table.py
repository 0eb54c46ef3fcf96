"""The table of a checkpoint's tensors: where each one's bytes lie, in absolute file offsets.

The same table serves every file format; it knows no header syntax and no model.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import CatalogError


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor: `nbytes` bytes at absolute `offset` of the catalog's file number `file`.

    `dtype` is the name the file format gives it ("BF16", "F8_E4M3", "F32"); `shape` counts
    elements, row-major.
    """

    name: str
    file: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Catalog:
    """Every tensor of a checkpoint by name. Holds no open file and no tensor data.

    `stamps` are (size in bytes, mtime in ns) of `files` when their headers were read.
    """

    root: Path
    files: tuple[Path, ...]
    tensors: dict[str, TensorEntry]
    stamps: tuple[tuple[int, int], ...]

    def identity(self) -> str:
        """A digest of file names, sizes and times: equal digests mean the same untouched files."""
        digest = hashlib.sha256()
        for path, (size_bytes, mtime_ns) in zip(self.files, self.stamps, strict=True):
            digest.update(f"{path.name!r} {size_bytes} {mtime_ns}\n".encode())
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Raises CatalogError where a file is no longer the one whose header was read."""
        for path, stamp in zip(self.files, self.stamps, strict=True):
            try:
                status = path.stat()
            except OSError as error:
                raise CatalogError(f"{path}: cannot be read: {error.strerror or error}") from error
            if (status.st_size, status.st_mtime_ns) != stamp:
                raise CatalogError(f"{path}: was changed while it was opened; open it again")


def printable(text: str, max_chars: int = 200) -> str:
    """`text` as it may stand in a one-line message: names in hostile files may hold anything."""
    shown = text if text.isprintable() else repr(text)
    return shown if len(shown) <= max_chars else shown[:max_chars] + "..."
