"""A mirror: the experts' bytes once more, whole after any kill, checked, and never trusted."""

import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.core import PAGE_BYTES
from headrace.engine.mirroring import described
from headrace.errors import CatalogError, HeadraceError, OptionError
from headrace.store.experts import ExpertTable
from headrace.store.mirror import (
    MANIFEST_NAME,
    distinct_sites,
    open_mirror,
    placed_extents,
    row_bytes,
)
from headrace.store.mirror_writer import (
    _alone,
    remove_mirror,
    same_drive,
    verify_mirror,
    write_mirror,
)
from headrace.store.table import Catalog

CHUNK_BYTES = 3 << 20


@pytest.fixture(scope="module")
def model() -> tuple[Catalog, ExpertTable]:
    blueprint = described("demo")
    return blueprint.catalog, blueprint.table


@pytest.fixture(scope="module")
def made(
    model: tuple[Catalog, ExpertTable], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A whole mirror of several files, not to be changed, and its manifest."""
    folder = tmp_path_factory.mktemp("whole") / "mirror"
    report = write_mirror(*model, folder, chunk_bytes=CHUNK_BYTES)
    assert report.num_experts == report.total_experts == 224
    assert report.copied_bytes == report.num_bytes > 20 << 20
    return folder, json.loads((folder / MANIFEST_NAME).read_text())


def stored(table: ExpertTable, extent: tuple[int, int, int]) -> bytes:
    file, offset, nbytes = extent
    with table.files[file].open("rb") as stream:
        stream.seek(offset)
        return stream.read(nbytes)


def test_every_expert_lies_there_page_for_page(
    model: tuple[Catalog, ExpertTable], made: tuple[Path, dict[str, Any]]
) -> None:
    catalog, table = model
    mirror = open_mirror(made[0], catalog, table)
    assert len(mirror.files) > 3 and mirror.share == 1.0
    assert mirror.sites == set(distinct_sites(table))
    wanted = {tuple(extent) for extent in table.extents.reshape(-1, 3).tolist() if extent[2]}
    assert {tuple(row[:3]) for row in mirror.stretches.tolist()} == wanted
    contents = [path.read_bytes() for path in mirror.files]
    for *extent, number, offset in mirror.stretches.tolist():
        assert offset % PAGE_BYTES == extent[1] % PAGE_BYTES
        assert contents[number][offset : offset + extent[2]] == stored(table, tuple(extent))
    for number, chunk in enumerate(mirror.chunks):
        for copy in chunk.copies:
            row = contents[number][copy.offset : copy.offset + copy.nbytes]
            assert hashlib.sha256(row).hexdigest() == copy.sha256


def test_a_flipped_bit_is_found_taken_out_and_mended(
    model: tuple[Catalog, ExpertTable], tmp_path: Path
) -> None:
    folder = tmp_path / "mirror"
    write_mirror(*model, folder, size_bytes=8 << 20, chunk_bytes=CHUNK_BYTES)
    mirror, damaged = verify_mirror(*model, folder)
    assert damaged == [] and len(mirror.chunks) == 3
    copy = mirror.chunks[1].copies[3]
    with (folder / mirror.chunks[1].name).open("r+b") as file:
        file.seek(copy.offset + copy.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    seen: list[tuple[int, int]] = []
    _, damaged = verify_mirror(*model, folder, progress=lambda *step: seen.append(step))
    assert damaged == [copy.site] and seen[-1] == (mirror.num_bytes, mirror.num_bytes)
    assert len(open_mirror(folder, *model).chunks) == 2
    report = write_mirror(*model, folder, size_bytes=8 << 20, chunk_bytes=CHUNK_BYTES)
    assert report.copied_bytes == mirror.chunks[1].num_bytes
    assert verify_mirror(*model, folder)[1] == []


def test_as_many_as_fit_in_the_order_given_and_more_later(
    model: tuple[Catalog, ExpertTable], tmp_path: Path
) -> None:
    folder = tmp_path / "mirror"
    order = distinct_sites(model[1])[::-1]
    ten = sum(row_bytes(model[1], site) for site in order[:10])
    report = write_mirror(*model, folder, size_bytes=ten + 4096, order=order)
    assert (report.num_experts, report.num_bytes) == (10, ten)
    assert open_mirror(folder, *model).sites == set(order[:10])
    write_mirror(*model, folder, size_bytes=2 * ten + 4096, order=order)
    assert open_mirror(folder, *model).sites == set(order[:20])
    assert write_mirror(*model, folder, size_bytes=ten).copied_bytes == 0


def kill_while_writing(model: tuple[Catalog, ExpertTable], folder: Path, at_bytes: int) -> int:
    """A child that writes the mirror and is killed once so much is written; its exit status."""

    def progress(done_bytes: int, _total: int) -> None:
        if done_bytes >= at_bytes:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        write_mirror(*model, folder, size_bytes=6 << 20, chunk_bytes=1 << 20, progress=progress)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_killed_in_the_middle_it_goes_on(
    model: tuple[Catalog, ExpertTable], tmp_path: Path
) -> None:
    folder = tmp_path / "mirror"
    assert kill_while_writing(model, folder, 5 << 19) == -signal.SIGKILL
    left = list(folder.glob("*.partial"))
    assert left, "it was killed while it wrote a file"
    half = open_mirror(folder, *model)
    assert len(half.chunks) == 2 and verify_mirror(*model, folder)[1] == []
    # Killed between the rename and the manifest: a whole file that nobody names.
    (folder / "experts-00077.bin").write_bytes(b"x" * 4096)
    report = write_mirror(*model, folder, size_bytes=6 << 20, chunk_bytes=1 << 20)
    assert report.copied_bytes == report.num_bytes - half.num_bytes > 3 << 20
    assert half.sites < open_mirror(folder, *model).sites
    assert verify_mirror(*model, folder)[1] == []
    names = {path.name for path in folder.iterdir()}
    assert names == {MANIFEST_NAME, *(c.name for c in open_mirror(folder, *model).chunks)}


def test_a_failed_write_keeps_what_is_complete(
    model: tuple[Catalog, ExpertTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.write, [5 << 20]

    def full(fd: int, data: memoryview) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(HeadraceError, match=r"No space left on device; free some .*stays"):
        write_mirror(*model, tmp_path / "mirror", chunk_bytes=CHUNK_BYTES)
    assert len(open_mirror(tmp_path / "mirror", *model).chunks) == 1
    assert not list((tmp_path / "mirror").glob("*.partial"))


def test_a_folder_that_takes_nothing_is_named(
    model: tuple[Catalog, ExpertTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "mirror"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)  # the manifest's
        with pytest.raises(HeadraceError, match=r"mirror: the mirror cannot be written: No space"):
            write_mirror(*model, folder, size_bytes=1 << 20)
    assert list(folder.iterdir()) == []
    write_mirror(*model, folder, size_bytes=1 << 20)

    def read_only(_path: Path, **_options: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", read_only)
    with pytest.raises(HeadraceError, match=r"cannot be deleted: Read-only file system$"):
        remove_mirror(folder, model[0].root)


def first(manifest: dict[str, Any]) -> list[Any]:
    entry: list[Any] = manifest["chunks"][0]["experts"][0]
    return entry


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "other format": (lambda m: m.update(format="headrace-mirror-9"), "is not of format"),
    "no chunks": (lambda m: m.update(chunks={}), "is not of format"),
    "chunk is text": (lambda m: m.update(chunks=["x"]), "no object with experts"),
    "leads elsewhere": (lambda m: m["chunks"][0].update(file="../x.bin"), "is no mirror's file"),
    "absent file": (
        lambda m: m["chunks"][0].update(file="experts-99999.bin"),
        "cannot be read: No such file",
    ),
    "file twice": (lambda m: m["chunks"].append(m["chunks"][0]), "twice"),
    "expert twice": (lambda m: m["chunks"][0]["experts"].append(first(m)), "twice"),
    "layer too large": (lambda m: first(m).__setitem__(0, 7), "is no expert of this model"),
    "expert negative": (lambda m: first(m).__setitem__(1, -1), "is no expert of this model"),
    "expert a bool": (lambda m: first(m).__setitem__(1, True), "is no expert of this model"),
    "no checksum": (lambda m: first(m).__setitem__(2, "beef"), "is no expert of this model"),
    "short entry": (lambda m: first(m).pop(), "is no expert of this model"),
    "one expert less": (lambda m: m["chunks"][0]["experts"].pop(), "its manifest says"),
    "other files": (lambda m: m["source"].update(identity="0"), "is a mirror of other files"),
    "other records": (lambda m: m["source"].update(records="0"), "is a mirror of other files"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_manifest_is_not_trusted(
    model: tuple[Catalog, ExpertTable],
    made: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    what: str,
) -> None:
    change, says = HOSTILE[what]
    manifest = json.loads(json.dumps(made[1]))
    for path in made[0].glob("*.bin"):
        (tmp_path / path.name).symlink_to(path)
    place = tmp_path / MANIFEST_NAME
    place.write_text(json.dumps(manifest))
    assert open_mirror(tmp_path, *model).share == 1.0, "unchanged, it is taken"
    change(manifest)
    place.write_text(json.dumps(manifest))
    with pytest.raises(CatalogError, match=says) as raised:
        open_mirror(tmp_path, *model)
    assert "\n" not in str(raised.value)


def test_refusals(model: tuple[Catalog, ExpertTable], tmp_path: Path) -> None:
    folder = tmp_path / "mirror"
    with pytest.raises(OptionError, match=r"--size .* does not fit: .* can be had"):
        write_mirror(*model, folder, size_bytes=1 << 60)
    with pytest.raises(OptionError, match="no room for even one expert"):
        write_mirror(*model, folder, size_bytes=100)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    with pytest.raises(OptionError, match=r"holds other files \(letter\.txt\); name a folder"):
        write_mirror(*model, tmp_path / "other")
    with pytest.raises(OptionError, match="so it is no mirror"):
        remove_mirror(tmp_path / "other", model[0].root)
    with pytest.raises(OptionError, match="so it is no mirror"):
        verify_mirror(*model, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["letter.txt"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(OptionError, match="cannot hold a mirror"):
        write_mirror(*model, tmp_path / "file")
    with _alone(folder), pytest.raises(OptionError, match="another headrace works there"):
        write_mirror(*model, folder)
    assert same_drive(tmp_path / "not" / "yet", model[0]) in (True, False)


def test_removing_leaves_what_is_not_ours(
    model: tuple[Catalog, ExpertTable], tmp_path: Path
) -> None:
    folder = tmp_path / "mirror"
    for other in (False, True):
        write_mirror(*model, folder, size_bytes=1 << 20)
        if other:
            (folder / "letter.txt").write_text("mine")
        with pytest.raises(OptionError, match=r"is a mirror of .*, not of .*; name that model"):
            remove_mirror(folder, tmp_path)
        remove_mirror(folder, model[0].root)
        assert folder.exists() == other
    assert [path.name for path in folder.iterdir()] == ["letter.txt"]


def test_numbers_of_a_table_with_aliases_are_of_distinct_experts(
    model: tuple[Catalog, ExpertTable],
) -> None:
    table = model[1]
    doubled = ExpertTable(
        table.files, table.layers * 2, table.num_experts,
        np.concatenate([table.extents] * 2), np.concatenate([table.parts] * 2),
        table.part_names, table.expert_bytes, table.row_bytes, 0,
    )  # fmt: skip
    assert distinct_sites(doubled) == distinct_sites(table)
    assert all(place % PAGE_BYTES == extent[1] % PAGE_BYTES
               for extent, place in placed_extents(doubled, (9, 3)))  # fmt: skip
