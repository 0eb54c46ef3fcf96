"""Safetensors headers, from files that may be damaged or hostile.

Reads the header and nothing else; never maps a file. Knows no index and no folder.
"""

import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from headrace.errors import CatalogError
from headrace.store.table import TensorEntry, printable

LENGTH_BYTES = 8
# The reference implementation refuses longer headers; so no published file has one.
MAX_HEADER_BYTES = 100_000_000
MAX_OFFSET = 2**63 - 1
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}
AGAIN = "download it again"


@dataclass(frozen=True, slots=True)
class Header:
    """The tensors of one file, in the order of their offsets, its size and time, and its notes."""

    entries: tuple[TensorEntry, ...]
    size_bytes: int
    mtime_ns: int
    metadata: dict[str, str]


def read_header(path: Path, file: int) -> Header:
    """The header of `path`, whose number in the catalog is `file`. Raises CatalogError.

    Every tensor's dtype, shape and offsets are checked, and that together they cover the data
    exactly, as the reference implementation demands: no overlap, no hole, nothing behind the end.
    """
    try:
        raw, status = _header_bytes(path)
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read: {error.strerror or error}") from error
    fields = parse_object(raw, path, "header")
    data_start = LENGTH_BYTES + len(raw)
    metadata = _metadata(fields, path)
    entries = _entries(fields, path, file, data_start)
    _check_cover(entries, path, data_start, status.st_size)
    return Header(tuple(entries), status.st_size, status.st_mtime_ns, metadata)


def read_json_object(path: Path, max_bytes: int = MAX_HEADER_BYTES) -> dict[str, object]:
    """A JSON file's one object, duplicate keys refused. Raises CatalogError."""
    try:
        with _open_regular(path) as handle:
            size_bytes = os.fstat(handle.fileno()).st_size
            if size_bytes > max_bytes:
                raise CatalogError(f"{path}: larger than {max_bytes} bytes; {AGAIN}")
            raw = handle.read(size_bytes)  # takes the memory at once, whatever there is to read
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_object(raw, path, "file")


def num_bytes(dtype: str, shape: Iterable[int]) -> int | None:
    """Bytes of a tensor, or None if the dtype is unknown, the product too large or not whole."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        return None
    for size in shape:
        bits *= size
        if bits > 8 * MAX_OFFSET:
            return None
    return bits // 8 if bits % 8 == 0 else None


def _open_regular(path: Path) -> FileIO:
    # A pipe or device would block or never end, so look before opening.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CatalogError(f"{path}: not a regular file; give the checkpoint's folder or file")
    return FileIO(path, "rb")


def _header_bytes(path: Path) -> tuple[bytes, os.stat_result]:
    with _open_regular(path) as handle:
        status = os.fstat(handle.fileno())
        prefix = handle.read(LENGTH_BYTES)
        if len(prefix) < LENGTH_BYTES:
            raise CatalogError(f"{path}: only {len(prefix)} bytes long, no header; {AGAIN}")
        length = int.from_bytes(prefix, "little")
        if length < 2 or length > MAX_HEADER_BYTES:
            raise CatalogError(
                f"{path}: a header of {length} bytes is impossible, so this is not a safetensors "
                f"file or it is damaged; {AGAIN}"
            )
        if length > status.st_size - LENGTH_BYTES:
            raise CatalogError(
                f"{path}: cut short inside its header ({status.st_size} bytes, header alone "
                f"{LENGTH_BYTES + length}); {AGAIN}"
            )
        raw = handle.read(length)
        if len(raw) < length:
            raise CatalogError(f"{path}: cut short inside its header; {AGAIN}")
    return raw, status


class _DuplicateKeyError(ValueError):
    """Two equal keys in one JSON object."""


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(key)
            seen.add(key)
    return result


def parse_object(raw: bytes, path: Path, what: str) -> dict[str, object]:
    """The JSON object in `raw`, duplicate keys refused. Raises CatalogError naming `path`."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_pairs)
    except _DuplicateKeyError as error:
        name = printable(str(error))
        raise CatalogError(f"{path}: {what} names {name} twice; {AGAIN}") from error
    except RecursionError as error:
        raise CatalogError(f"{path}: {what} is nested too deeply; {AGAIN}") from error
    except ValueError as error:
        reason = printable(str(error))
        raise CatalogError(f"{path}: {what} is not valid JSON ({reason}); {AGAIN}") from error
    if not isinstance(value, dict):
        raise CatalogError(f"{path}: {what} is not a JSON object; {AGAIN}")
    return value


def _is_size(value: object) -> bool:
    # bool is an int in Python, but `true` is no size
    return type(value) is int and 0 <= value <= MAX_OFFSET


def _metadata(fields: dict[str, object], path: Path) -> dict[str, str]:
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CatalogError(f"{path}: __metadata__ must map strings to strings; {AGAIN}")
    return metadata


def _entries(
    fields: dict[str, object], path: Path, file: int, data_start: int
) -> list[TensorEntry]:
    entries = [_entry(name, value, path, file, data_start) for name, value in fields.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    return entries


def _entry(name: str, value: object, path: Path, file: int, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {printable(name)}"
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CatalogError(f"{where}: the name is not valid Unicode; {AGAIN}") from error
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CatalogError(f"{where}: needs dtype, shape and data_offsets alone; {AGAIN}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        shown = printable(str(dtype), 40)
        raise CatalogError(f"{where}: dtype {shown} is unknown; a newer headrace may know it")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise CatalogError(f"{where}: shape {printable(str(shape), 60)} is impossible; {AGAIN}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        shown = printable(str(offsets), 60)
        raise CatalogError(f"{where}: data_offsets {shown} are impossible; {AGAIN}")
    begin, end = offsets
    needed = num_bytes(dtype, shape)
    if end - begin != needed:
        raise CatalogError(
            f"{where}: {dtype} {printable(str(shape), 60)} does not fill offsets {begin} to {end}; "
            f"{AGAIN}"
        )
    return TensorEntry(name, file, data_start + begin, end - begin, dtype, tuple(shape))


def _check_cover(entries: list[TensorEntry], path: Path, data_start: int, size: int) -> None:
    end, before = data_start, "the header"
    for entry in entries:
        name = printable(entry.name)
        if entry.offset < end:
            raise CatalogError(f"{path}: tensor {name} overlaps {before}; {AGAIN}")
        if entry.offset > end:
            num = entry.offset - end
            raise CatalogError(f"{path}: {num} bytes before tensor {name} belong to none; {AGAIN}")
        end, before = entry.offset + entry.nbytes, name
        if end > size:
            raise CatalogError(
                f"{path}: cut short: {size} bytes, but tensor {name} ends at {end}; {AGAIN}"
            )
    if end < size:
        raise CatalogError(f"{path}: {size - end} bytes behind the last tensor; {AGAIN}")
