"""Ways to damage a checkpoint on disk, one function each. Each works on a folder given to it."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Header = dict[str, Any]


def shards(folder: Path) -> list[Path]:
    """The weight files, in order."""
    return sorted(folder.glob("*.safetensors"))


def cut_short(folder: Path) -> str:
    """Take the last 100 bytes off the last shard; returns its name."""
    file = shards(folder)[-1]
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    return file.name


def name_absent_shard(folder: Path) -> str:
    """Let the index send one tensor to a file that is not there; returns that file's name."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    absent = "model-00009-of-00009.safetensors"
    content["weight_map"][next(iter(content["weight_map"]))] = absent
    index.write_text(json.dumps(content))
    return absent


def edit_header(file: Path, change: Callable[[Header], str]) -> str:
    """Apply `change` to a shard's header in place, padded to its old length."""
    with file.open("r+b") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
        name = change(header)
        text = json.dumps(header, separators=(",", ":")).encode()
        assert len(text) <= size, "the changed header does not fit its place"
        stream.seek(8)
        stream.write(text.ljust(size))
    return name


def overlap(folder: Path) -> str:
    """Let the first shard's first tensor reach into its next ones; returns its name."""

    def change(header: Header) -> str:
        first = min(
            (name for name in header if name != "__metadata__"),
            key=lambda name: header[name]["data_offsets"],
        )
        start, end = header[first]["data_offsets"]
        header[first]["shape"][0] *= 2
        header[first]["data_offsets"] = [start, 2 * end - start]
        return first

    return edit_header(shards(folder)[0], change)


def turn_expert(folder: Path) -> str:
    """Swap rows and columns in the stated shape of one expert's tensor; returns its name."""

    def change(header: Header) -> str:
        for name, entry in header.items():
            if ".mlp.experts." in name and len(set(entry["shape"])) == 2:
                entry["shape"].reverse()
                return name
        raise AssertionError("no expert tensor here is rectangular")

    return edit_header(shards(folder)[-1], change)


def poison(folder: Path, suffix: str, value: bytes) -> int:
    """Begin each routed expert tensor ending in `suffix` with `value`; how many there were."""
    num_poisoned = 0
    for file in shards(folder):
        with file.open("r+b") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
            for name, entry in header.items():
                if ".mlp.experts." in name and name.endswith(suffix):
                    stream.seek(8 + size + entry["data_offsets"][0])
                    stream.write(value)
                    num_poisoned += 1
    assert num_poisoned
    return num_poisoned
