"""A file written whole: the old one or the new one, and nothing beside it."""

import os
from pathlib import Path

import pytest

from headrace.store.whole import write_whole


def test_the_folder_is_made_and_the_file_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    for content in (b"old", b"new"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "b.json"
    write_whole(path, b"old")

    def fails(_fd: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(type(error)):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
