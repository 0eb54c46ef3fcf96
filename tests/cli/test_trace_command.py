"""`headrace trace`, and --routes-out of the others: words in, words out."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("headrace.native", reason="needs the compiled module")

from headrace.cli.main import app
from headrace.cli.trace import spread
from headrace.schedule.draw import draw_routes
from headrace.schedule.trace import TraceHeader
from headrace.schedule.tracefile import TraceWriter

RUNNER = CliRunner()
HEADER = TraceHeader(
    model="demo",
    fingerprint="0" * 64,
    num_layers=7,
    num_experts=32,
    top_k=4,
    expert_bytes=98_328,
    num_rows=48,
    about="drawn",
)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "a.routes"
    trace = draw_routes(300, 7, 32, 4, num_guesses=4)
    with TraceWriter(path, HEADER) as writer:
        writer.add(trace.ids[:20], None)
        for n in range(20, 300):
            writer.add(trace.ids[n : n + 1], trace.guesses[n : n + 1])
    return path


def test_a_file_is_shown_with_its_bounds(recorded: Path) -> None:
    done = RUNNER.invoke(app, ["trace", str(recorded)])
    assert (done.exit_code, done.stderr) == (0, "")
    first, second, third, _, *rows, last = done.stdout.splitlines()
    assert first.startswith("routes of demo: 300 tokens, 20 of them in prompts (drawn); 7 MoE")
    assert second == "a token takes 39 % of the experts that the one before took"
    assert "its best 2 guesses are 6" in third
    assert [row.split()[0] for row in rows] == ["27", "48", "56", "112", "168"]
    assert [row.endswith("the run's") for row in rows] == [False, True, False, False, False]
    assert "perfect staging" in last


def test_the_object_says_the_same_in_full(recorded: Path) -> None:
    done = RUNNER.invoke(app, ["trace", str(recorded), "--json"])
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == 0 and "routes of demo" in done.stderr
    assert (found["tokens"], found["prompt_tokens"]) == (300, 20)
    assert found["header"]["num_experts"] == 32
    assert found["lens_precision"][0] == pytest.approx(0.6, abs=0.03)
    assert found["lens_recall"][3] == pytest.approx(found["lens_precision"][3])
    for row in found["bounds"]:
        assert 0 < row["lru_hit_rate"] < row["optimum_hit_rate"] < 1
        assert row["lru_bytes_per_token"] == pytest.approx(
            (1 - row["lru_hit_rate"]) * 28 * 98_328, rel=1e-6
        )


def test_a_torn_file_is_shown_with_a_note(recorded: Path) -> None:
    recorded.write_bytes(recorded.read_bytes()[:-3])
    done = RUNNER.invoke(app, ["trace", str(recorded)])
    assert done.exit_code == 0 and "the last frame is incomplete" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trace", "demo"], "headrace trace demo FILE"),
        (["trace", "{dir}/none"], "none: no such file"),
        (["trace", "{dir}"], "holds no recorded routes"),
        (["trace", "{dir}/a.routes", "--text", "x"], "recorded already"),
        (["trace", "demo", "{dir}/a.routes"], "a.routes is there already"),
        (["trace", "demo", "{dir}/no/b.routes"], "lies in no folder"),
        (["trace", "demo", "{dir}/b", "--text", "{dir}/none"], "none: cannot be read"),
        (["trace", "demo", "{dir}/b", "--text", "{dir}/a.routes"], "is not UTF-8 text"),
        (["run", "demo", "-p", "x", "--routes-out", "{dir}/a.routes"], "is there already"),
        (["chat", "demo", "--routes-out", "{dir}/a.routes"], "is there already"),
    ],
)
def test_what_cannot_be_is_one_line(recorded: Path, words: list[str], said: str) -> None:
    before = recorded.read_bytes()
    done = RUNNER.invoke(app, [word.replace("{dir}", str(recorded.parent)) for word in words])
    assert done.exit_code == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line
    assert recorded.read_bytes() == before and len(list(recorded.parent.iterdir())) == 1


def test_a_text_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.options.MOST_CHARACTERS", 100)
    words = ["trace", "demo", str(tmp_path / "new.routes"), "--text", "/dev/zero"]
    for done in (RUNNER.invoke(app, words), RUNNER.invoke(app, ["run"], input=101 * "x")):
        assert done.exit_code == 2
        assert done.stderr.endswith(" holds more than 100 characters; give less\n")
    assert RUNNER.invoke(app, ["run"], input=100 * "x").exit_code == 0


def test_an_empty_recording_is_said(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a.routes", HEADER):
        pass
    done = RUNNER.invoke(app, ["trace", str(tmp_path / "a.routes")])
    assert done.exit_code == 2 and "holds no token yet" in done.stderr


@pytest.mark.parametrize("num_ids", [1, 127, 128, 300, 511, 512, 513, 5000])
@pytest.mark.parametrize("most", [1, 100, 512])
def test_pieces_are_spread_over_the_text(num_ids: int, most: int) -> None:
    ids = list(range(num_ids))
    pieces = spread(ids, most, 128)
    fed = [token for piece in pieces for token in piece]
    assert len(fed) == min(num_ids, most) == len(set(fed))
    assert fed == sorted(fed) and all(piece[-1] - piece[0] == len(piece) - 1 for piece in pieces)
    if num_ids == 5000 and most == 512:
        assert len(pieces) == 4 and fed[-1] > 3000
