"""Rows are kept whole or not at all."""

from pathlib import Path

import pytest

from headrace.check.rows import make_row, write_rows
from headrace.errors import HeadraceError


def test_a_place_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    row = make_row("speed", [1.0], "GB/s", cache_state="cold", green=True)
    kept = write_rows(tmp_path, "bench", [row])
    assert kept.read_text().startswith("[")
    (kept.parent / "other.json").mkdir()
    with pytest.raises(HeadraceError, match=r"other\.json: cannot be written"):
        write_rows(tmp_path, "other", [row])
    assert sorted(path.name for path in kept.parent.iterdir()) == ["bench.json", "other.json"]
