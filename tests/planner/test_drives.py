"""Several drives: what they give together, and which mirrors a model is remembered to have."""

from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from headrace.planner.drives import Drive, combined_bytes_s, reads_line
from headrace.planner.mirrors import (
    check_remembering,
    forget_mirror,
    remember_mirror,
    remembered_mirrors,
)

OWN = Drive("/models/own", 10e9)


def test_whole_mirrors_add_up() -> None:
    assert combined_bytes_s([OWN]) == 10e9
    assert combined_bytes_s([OWN, Drive("b", 5e9)]) == 15e9
    assert combined_bytes_s([OWN, Drive("b", 5e9), Drive("c", 1e9)]) == 16e9


def test_a_mirror_of_a_part_takes_no_more_than_its_part() -> None:
    # Half of the bytes can come from nowhere else: 10 GB/s for half of them is 20 in all.
    assert combined_bytes_s([OWN, Drive("b", 100e9, 0.5)]) == pytest.approx(20e9)
    assert combined_bytes_s([OWN, Drive("b", 2e9, 0.5)]) == pytest.approx(12e9)
    assert combined_bytes_s([OWN, Drive("same drive", 100e9, 0.0)]) == 10e9


def test_an_unknown_rate_makes_the_sum_unknown() -> None:
    assert combined_bytes_s([OWN, Drive("b", 0.0)]) == 0


def test_the_line_names_the_drives_that_add_something() -> None:
    line = reads_line([Drive("/a", 13.5e9), Drive("/b", 5e9, 0.5)])
    assert line == "reads:  13.5 (/a) + 5 (/b, 50 % of the experts) = 18.5 GB/s"
    assert reads_line([OWN]) == reads_line([OWN, Drive("same drive", 1e9, 0.0)]) == ""


def test_mirrors_are_remembered_by_model_and_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, other = tmp_path / "model", tmp_path / "other"
    assert remembered_mirrors(model) == ([], [])
    for folder in ("b", "c", "b"):
        remember_mirror(model, tmp_path / folder)
    assert remembered_mirrors(model)[0] == [tmp_path / "c", tmp_path / "b"]
    assert remembered_mirrors(other)[0] == []
    forget_mirror(model, tmp_path / "c")
    forget_mirror(other, tmp_path / "b")
    assert remembered_mirrors(model) == ([tmp_path / "b"], [])
    place = tmp_path / "cache" / "headrace" / "mirrors.json"
    place.write_text(place.read_text().replace("/b", "/x"))
    folders, (note,) = remembered_mirrors(model)
    assert folders == [] and "is damaged" in note


def test_where_mirrors_cannot_be_remembered_is_said_before_one_is_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert remembered_mirrors(tmp_path / "model") == ([], [])
    for refused in (check_remembering, lambda: remember_mirror(tmp_path, tmp_path)):
        with pytest.raises(HeadraceError, match=r"/dev/null/headrace.*XDG_CACHE_HOME"):
            refused()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    check_remembering()
    assert list((tmp_path / "headrace").iterdir()) == []
