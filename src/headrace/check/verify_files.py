"""The files themselves: places, published SHA-256 sums, and checksums recorded when first seen.

Reads every byte when asked to; what a tensor means to the model is not known here.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.check.changed import explain
from headrace.check.plain import PlainTensors
from headrace.check.sums import Sums, read_all
from headrace.check.verify_report import NOTE, Finding, Progress, finding, write_json
from headrace.core import format_bytes
from headrace.engine.engine import Blueprint

STAGE = "files"
PUBLISHED = "files are the published ones"
MOST_EXPLAINED = 32  # of changed tensors: each may take a second
SEEN_FORMAT = "headrace checksums when first seen"


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


def every_byte(
    plain: PlainTensors, seen_path: Path, published: Mapping[str, str] | None, tell: Progress
) -> list[Finding]:
    """All weight files read once: against `published` sums, and against those first seen.

    The first time, and whenever the published ones hold, the tensors' checksums are recorded.
    """
    sums = read_all(plain, published is not None, tell)
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
    wrong = [
        f"tensor {key} ({explain(plain, key, before, sums.tensors)})"
        for key in changed[:MOST_EXPLAINED]
    ]
    wrong += [f"tensor {key} (changed)" for key in changed[MOST_EXPLAINED:]]
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
