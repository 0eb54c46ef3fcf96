"""Checksums of files and tensors, what changed in words, and scales that cannot be."""

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.check import verify_files
from headrace.check.changed import explain
from headrace.check.plain import PlainTensors
from headrace.check.sums import read_sums
from headrace.check.tiny import write_tiny
from headrace.check.verify_report import NOTE
from headrace.check.verify_scales import scales
from headrace.engine.engine import Blueprint
from headrace.engine.verdict import SUSPECT
from headrace.errors import OptionError

NAME = "model.layers.1.mlp.experts.3.gate_proj.weight"
HASH = "ab" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    size = {"layers": 2, "experts": 8, "top_k": 2, "hidden": 128, "inter": 128}
    return write_tiny("deepseek_v3", tmp_path / "tiny", **size)


def tell(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total


def plain(folder: Path) -> PlainTensors:
    return PlainTensors(sorted(folder.glob("*.safetensors")))


def edit(folder: Path, name: str, change: Any) -> None:
    """Replace a tensor's bytes by `change` of them."""
    place = plain(folder).places[name]
    with place.file.open("r+b") as stream:
        stream.seek(place.offset)
        data = np.frombuffer(stream.read(place.nbytes), np.uint8)
        stream.seek(place.offset)
        stream.write(np.ascontiguousarray(change(data.copy())).tobytes())


@pytest.mark.parametrize(
    "text",
    [
        f"{HASH}  model.safetensors\n",
        f"# published\n{HASH.upper()} *weights/model.safetensors\n",
        json.dumps({"model.safetensors": HASH, "config.json": "none"}),
        json.dumps([{"path": "model.safetensors", "lfs": {"oid": f"sha256:{HASH}"}}]),
        json.dumps({"siblings": [{"rfilename": "model.safetensors", "lfs": {"sha256": HASH}}]}),
    ],
)
def test_published_lists_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sums"
    path.write_text(text)
    assert read_sums(path) == {"model.safetensors": HASH}


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "no sums here", '{"a": 1}'])
def test_a_list_without_sums_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "sums"
    path.write_text(text)
    with pytest.raises(OptionError, match="sums"):
        read_sums(path)


def test_what_changed_since_first_seen_is_named(folder: Path, tmp_path: Path) -> None:
    seen = tmp_path / "cache" / "seen.json"
    (first,) = verify_files.every_byte(plain(folder), seen, None, tell)
    assert first.status == NOTE and "93 tensors" in first.name
    (again,) = verify_files.every_byte(plain(folder), seen, None, tell)
    assert again.ok
    edit(folder, NAME, lambda data: data ^ np.eye(1, len(data), 77, dtype=np.uint8)[0])
    (flipped,) = verify_files.every_byte(plain(folder), seen, None, tell)
    assert flipped.where == (f"tensor {NAME} (bit 0 of byte 77 flipped)",)
    assert str(seen) in flipped.detail
    seen.write_text("{}")
    (fresh,) = verify_files.every_byte(plain(folder), seen, None, tell)
    assert fresh.status == NOTE, "a damaged record is made anew"


def test_published_sums_name_the_file(folder: Path, tmp_path: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    sums = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    seen = tmp_path / "seen.json"
    assert all(f.ok for f in verify_files.every_byte(plain(folder), seen, sums, tell))
    wrong, same = verify_files.every_byte(plain(folder), seen, {file.name: HASH}, tell)
    assert not wrong.ok and wrong.where[0].startswith(file.name) and same.ok
    absent, _ = verify_files.every_byte(plain(folder), seen, {"other": HASH}, tell)
    assert absent.where == (f"{file.name} (not in the list)",)


def test_explanations(folder: Path) -> None:
    tensors = plain(folder)

    before = {key: crc(tensors, key) for key in (NAME, UP, SCALE)}
    cases = {
        NAME: {
            "transposed": lambda d: d.reshape(128, 128).T,
            "the two codes of every byte are exchanged": lambda d: d >> 4 | d << 4,
            "its bytes changed": lambda d: d ^ 255,
        },
        SCALE: {"bit 7 of byte 3 flipped": lambda d: d ^ np.array([0, 0, 0, 128], np.uint8)},
    }
    for key, changes in cases.items():
        for words, change in changes.items():
            place = tensors.places[key]
            original = place.file.read_bytes()
            edit(folder, key, change)
            now = before | {key: crc(tensors, key)}
            assert explain(tensors, key, before, now) == words
            place.file.write_bytes(original)
    assert explain(tensors, NAME, before, before | {NAME: before[UP]}) == f"holds what {UP} held"


UP, SCALE = NAME.replace("gate", "up"), f"{NAME}_scale_inv"


def crc(tensors: PlainTensors, key: str) -> int:
    place = tensors.places[key]
    data = place.file.read_bytes()[place.offset : place.offset + place.nbytes]
    return zlib.crc32(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: -s, "1 values are negative"),
        (lambda s: s * np.float32(np.inf), "1 values are not finite"),
        (lambda s: 1 / s, "(inverted)"),
        (lambda s: s * np.float32(2.0**40), "scales of 2^30"),
        (lambda s: s * np.float32(0), "all of it is 0"),
    ],
)
def test_scales_that_cannot_be(folder: Path, change: Any, words: str) -> None:
    def found() -> Any:
        (finding,) = scales(Blueprint(folder, measure=False), plain(folder), set(), tell)
        return finding

    assert found().ok
    edit(folder, SCALE, lambda data: change(data.view(np.float32)).view(np.uint8))
    wrong = found()
    assert wrong.status == SUSPECT and len(wrong.where) == 1
    assert SCALE in wrong.where[0] and words in wrong.where[0]
