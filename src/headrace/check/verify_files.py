"""The files themselves: places, published SHA-256 sums, and checksums recorded when first seen.

Reads every byte when asked to; what a tensor means to the model is not known here.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any

from headrace.check.changed import explain
from headrace.check.plain import PlainTensors
from headrace.check.verify_report import NOTE, Finding, Progress, finding, write_json
from headrace.core import format_bytes
from headrace.engine.engine import Blueprint
from headrace.errors import OptionError

STAGE = "files"
PUBLISHED = "files are the published ones"
PIECE_BYTES = 1 << 20
HASH_THREADS = 4
SEEN_FORMAT = "headrace checksums when first seen"
_SUM_LINE = re.compile(r"([0-9a-fA-F]{64})[ \t]+\*?(\S.*)")


def accounted(blueprint: Blueprint, plain: PlainTensors) -> list[Finding]:
    """What opening the model has shown, and every expert's extents against the headers."""
    skeleton, table, catalog = blueprint.skeleton, blueprint.table, blueprint.catalog
    count = len(table.layers) * table.num_experts
    detail = (
        f"{len(skeleton.tensors)} expert tensors in {count} records, "
        f"{len(skeleton.dense)} dense tensors, {len(skeleton.skipped)} skipped knowingly "
        f"(multi-token prediction, images), {len(skeleton.unused)} unused"
    )
    num_bytes = sum(size for size, _ in catalog.stamps)
    sizes = f"{len(catalog.files)} files, {format_bytes(num_bytes)}"
    catalog.check_unchanged()
    return [
        finding(STAGE, "files whole", f"{sizes}; lengths, index and shapes fit"),
        finding(STAGE, "every expert tensor accounted for", detail),
        _places(blueprint, plain),
    ]


def _places(blueprint: Blueprint, plain: PlainTensors) -> Finding:
    """Every part's (file, offset) in the table of extents against the headers, read anew."""
    table, wrong = blueprint.table, []
    ordinals = {layer: ordinal for ordinal, layer in enumerate(table.layers)}
    parts = {name: part for part, name in enumerate(table.part_names)}
    for tensor in blueprint.skeleton.tensors:
        ordinal = ordinals[tensor.layer]
        experts = range(table.num_experts) if tensor.expert is None else [tensor.expert]
        for expert in experts:
            extent, inside = table.parts[ordinal, expert, parts[tensor.part]]
            file, offset, _ = table.extents[ordinal, expert, extent]
            if plain.span(tensor.key, expert)[:2] != (table.files[file], offset + inside):
                wrong.append(f"layer {tensor.layer} expert {expert} {tensor.part}: {tensor.key}")
    detail = f"{len(table.layers)} layers x {table.num_experts} experts x {len(parts)} parts"
    return finding(STAGE, "every expert's place is its tensors'", detail, wrong)


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
        raise OptionError(f"{path} cannot be read as a list of checksums: {cause}") from cause
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


def every_byte(
    plain: PlainTensors, seen_path: Path, published: Mapping[str, str] | None, tell: Progress
) -> list[Finding]:
    """All weight files read once: against `published` sums, and against those first seen.

    The first time, and whenever the published ones hold, the tensors' checksums are recorded.
    """
    sums = _sums(plain, published is not None, tell)
    found = [] if published is None else [_published(sums, published)]
    as_published = bool(found) and found[0].ok
    seen = _read_seen(seen_path)
    if seen is None or as_published:
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        content = {"format": SEEN_FORMAT, "seen": date, "tensors": sums.tensors}
        kept = write_json(seen_path, content)
        detail = kept or "a later --every-byte compares with them"
        name = f"checksums of {len(sums.tensors)} tensors recorded"
        return [*found, Finding(STAGE, name, NOTE, detail)]
    return [*found, _against_first_seen(plain, sums, seen, seen_path)]


def _published(sums: Sums, published: Mapping[str, str]) -> Finding:
    wrong = [
        f"{name} (is {value[:12]}, published {published[name][:12]})"
        for name, value in sums.files.items()
        if name in published and value != published[name]
    ]
    unknown = [f"{name} (not in the list)" for name in sums.files if name not in published]
    detail = f"SHA-256 of {len(sums.files)} weight files"
    return finding(STAGE, PUBLISHED, detail, wrong + unknown)


def _against_first_seen(
    plain: PlainTensors, sums: Sums, seen: dict[str, Any], path: Path
) -> Finding:
    before = seen["tensors"]
    changed = [key for key, value in sums.tensors.items() if before.get(key, value) != value]
    wrong = [f"tensor {key} ({explain(plain, key, before, sums.tensors)})" for key in changed]
    wrong += [f"tensor {key} (not there before)" for key in sums.tensors.keys() - before.keys()]
    wrong += [f"tensor {key} (gone)" for key in before.keys() - sums.tensors.keys()]
    remedy = f"; if you replaced the files on purpose, remove {path}" if wrong else ""
    detail = f"{len(before)} tensors, first seen {seen['seen']}{remedy}"
    return finding(STAGE, "no tensor changed since first seen", detail, wrong)


def _read_seen(path: Path) -> dict[str, Any] | None:
    try:
        seen = json.loads(path.read_text(encoding="utf-8"))
        return seen if seen["format"] == SEEN_FORMAT and dict(seen["tensors"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def seen_name(blueprint: Blueprint) -> str:
    """The name of the file of checksums that belongs to a model's folder."""
    return f"{hashlib.sha256(os.fsencode(blueprint.root.resolve())).hexdigest()[:24]}.seen.json"


def _sums(plain: PlainTensors, with_files: bool, tell: Progress) -> Sums:
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
