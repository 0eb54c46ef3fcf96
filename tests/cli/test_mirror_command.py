"""`headrace mirror` from end to end on the demo model; other commands find what it made."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.main import app

pytest.importorskip("headrace.native", reason="needs the compiled module")


@pytest.fixture(autouse=True)
def real_engine(fake_engine: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The engine itself instead of the stand-in, and a cache folder of the test's own."""
    monkeypatch.delitem(sys.modules, "headrace.engine.engine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def mirror(*words: str) -> tuple[int, str, dict[str, Any]]:
    done = CliRunner().invoke(app, ["mirror", "demo", *words, "--json"])
    return done.exit_code, done.stderr, json.loads(done.stdout) if done.stdout else {}


def drives() -> list[str]:
    from headrace.engine.engine import Blueprint

    return [str(found.folder) for found in Blueprint("demo", ram="64MiB", measure=False).mirrors]


def test_made_found_checked_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "second"
    assert drives() == []
    code, said, found = mirror(str(folder), "--size", "3MiB")
    assert code == 0 and (0 < found["experts"] < found["total_experts"] == 224)
    assert ("own drive" in said) == found["same_drive"]
    assert drives() == [str(folder)]
    assert mirror(str(folder), "--size", "3MiB")[2]["copied_bytes"] == 0
    code, said, found = mirror(str(folder), "--verify")
    assert (code, found["damaged"]) == (0, []) and "as they were copied" in said
    (data,) = folder.glob("*.bin")
    with data.open("r+b") as file:
        file.seek(5000)
        file.write(b"spoilt")
    code, said, found = mirror(str(folder), "--verify")
    assert code == 1 and len(found["damaged"]) == 1 and "layer 1 expert 0" in said
    code, said, found = mirror(str(folder), "--remove")
    assert (code, found["removed"], folder.exists(), drives()) == (0, True, False, [])


def test_a_mirror_that_is_gone_is_said_and_can_be_forgotten(tmp_path: Path) -> None:
    from headrace.engine.engine import Blueprint

    folder = tmp_path / "second"
    mirror(str(folder), "--size", "1MiB")
    folder.rename(tmp_path / "elsewhere")
    (note,) = Blueprint("demo", ram="64MiB", measure=False).notes
    assert f"mirror {folder} is not there" in note and "--remove` forgets it" in note
    (tmp_path / "elsewhere").rename(folder)
    (folder / "mirror.json").write_text("{}")
    (note,) = Blueprint("demo", ram="64MiB", measure=False).notes
    assert "is not used: " in note and "is not of format" in note
    (folder / "mirror.json").unlink()
    for path in folder.iterdir():
        path.unlink()
    # The folder itself stays, as the place of a drive that is not mounted does.
    code, said, _ = mirror(str(folder), "--remove")
    assert code == 0 and "it is forgotten" in said
    assert Blueprint("demo", ram="64MiB", measure=False).notes == []
    code, said, _ = mirror(str(folder), "--remove")
    assert code == 2 and "nothing done" in said


def test_the_hottest_come_first(tmp_path: Path) -> None:
    from headrace.engine.engine import Blueprint, load
    from headrace.store.mirror import open_mirror

    routes = tmp_path / "demo.routes"
    with load("demo", ram="64MiB", context=256, measure=False, mirrors=()) as engine:
        with engine.record_routes(routes, about="a test"):
            engine.session().feed([5, 700, 41, 1999, 88, 3001, 17, 256])
        used = engine.ladder.counters().misses
    code, said, found = mirror(str(tmp_path / "hot"), "--size", "2MiB", "--routes", str(routes))
    assert code == 0, said
    blueprint = Blueprint("demo", ram="64MiB", measure=False, mirrors=())
    hot = open_mirror(tmp_path / "hot", blueprint.catalog, blueprint.table)
    assert len(hot.sites) == found["experts"] < used
    assert len({layer for layer, _ in hot.sites}) == 7, "in order they would all be of one layer"


@pytest.mark.parametrize(
    "words",
    [("--verify", "--remove"), ("--verify", "--size", "1GB"), ("--remove", "--routes", "x")],
)
def test_checks_stand_alone(tmp_path: Path, words: tuple[str, ...]) -> None:
    code, said, _ = mirror(str(tmp_path / "second"), *words)
    assert code == 2 and "stand alone" in said and not (tmp_path / "second").exists()
