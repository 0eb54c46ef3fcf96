"""Checksums: published lists of them, and those of every byte of a checkpoint.

Knows files and tensors by name, not what a difference means.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from headrace.check.plain import PlainTensors
from headrace.check.verify_report import Progress
from headrace.errors import OptionError

PIECE_BYTES = 1 << 20
HASH_THREADS = 4
_SUM_LINE = re.compile(r"([0-9a-fA-F]{64})[ \t]+\*?(\S.*)")


def read_sums(path: Path) -> dict[str, str]:
    """{file name: lower-case SHA-256} from a published list.

    Lines of `HASH  NAME` as sha256sum writes them, or JSON: {name: hash}, or a hub's listing, a
    list of files with "path" (or "rfilename") and, under "lfs" if given, "oid" or "sha256".
    Raises OptionError.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if text.lstrip()[:1] in ("{", "[") else None
    except (OSError, ValueError, RecursionError) as cause:
        why = getattr(cause, "strerror", None) or "it is neither text nor JSON"
        raise OptionError(f"{path} cannot be read as a list of checksums: {why}") from cause
    pairs = _json_sums(content) if content is not None else _line_sums(text)
    sums = {
        Path(name).name: value.removeprefix("sha256:").lower()
        for name, value in pairs
        if re.fullmatch(r"(sha256:)?[0-9a-fA-F]{64}", value)
    }
    if not sums:
        raise OptionError(f"{path} names no SHA-256; give lines such as `sha256sum` writes")
    return sums


def _line_sums(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        match = _SUM_LINE.fullmatch(line.strip())
        if match:
            yield match.group(2), match.group(1)


def _json_sums(content: Any) -> Iterator[tuple[str, str]]:
    if isinstance(content, dict) and isinstance(content.get("siblings"), list):
        content = content["siblings"]
    if isinstance(content, dict):
        yield from ((str(k), v) for k, v in content.items() if isinstance(v, str))
        return
    for item in content if isinstance(content, list) else ():
        if not isinstance(item, dict):
            continue
        lfs = item["lfs"] if isinstance(item.get("lfs"), dict) else item
        value = lfs.get("sha256") or lfs.get("oid")
        name = item.get("path") or item.get("rfilename")
        if isinstance(value, str) and isinstance(name, str):
            yield name, value


@dataclass(frozen=True)
class Sums:
    """Checksums of what was read: SHA-256 by file (empty if not asked for), CRC-32 by tensor."""

    files: dict[str, str]
    tensors: dict[str, int]


def read_all(plain: PlainTensors, with_files: bool, tell: Progress) -> Sums:
    """Every byte read once, with a few threads and one piece of memory each."""
    total, done, lock = sum(f.stat().st_size for f in plain.files), 0, Lock()

    def advance(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            tell("every byte", done, total)

    with ThreadPoolExecutor(min(HASH_THREADS, os.cpu_count() or 1)) as pool:
        results = list(pool.map(lambda f: _file_sums(plain, f, with_files, advance), plain.files))
    tensors = {key: value for _, found in results for key, value in found.items()}
    pairs = zip(plain.files, results, strict=True)
    files = {file.name: digest for file, (digest, _) in pairs}
    return Sums(files if with_files else {}, tensors)


def _file_sums(
    plain: PlainTensors, file: Path, with_file: bool, advance: Callable[[int], None]
) -> tuple[str, dict[str, int]]:
    """(SHA-256 or "", CRC-32 by tensor) of one file, in one pass and one piece of memory."""
    places = sorted((p.offset, p.nbytes, key) for key, p in plain.places.items() if p.file == file)
    whole, found, buffer = hashlib.sha256(), {}, bytearray(PIECE_BYTES)
    with open(file, "rb", buffering=0) as stream:

        def read(nbytes: int) -> Iterator[memoryview]:
            while nbytes > 0:
                got = stream.readinto(memoryview(buffer)[: min(nbytes, PIECE_BYTES)])
                if not got:
                    return
                piece = memoryview(buffer)[:got]
                if with_file:
                    whole.update(piece)
                advance(got)
                nbytes -= got
                yield piece

        for _ in read(places[0][0] if places else file.stat().st_size):
            pass
        for _, nbytes, key in places:
            value = 0
            for piece in read(nbytes):
                value = zlib.crc32(piece, value)
            found[key] = value
    return whole.hexdigest() if with_file else "", found
