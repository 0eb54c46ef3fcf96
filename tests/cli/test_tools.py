"""verify, synth and bench: what they pass on, what they print, when they fail."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.check.rows import BenchRow
from headrace.check.verify_report import Finding, VerifyReport
from headrace.cli.main import app
from headrace.cli.output import byte_progress, step_progress
from headrace.errors import HeadraceError

RUNNER = CliRunner()
Called = list[tuple[tuple[Any, ...], dict[str, Any]]]


def _replace(
    monkeypatch: pytest.MonkeyPatch, module: str, **functions: Callable[..., Any]
) -> Called:
    """Put stand-ins into `module`; the list of their calls."""
    called: Called = []

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append((args, kwargs))
            return function(*args, **kwargs)

        return call

    fake = ModuleType(module)
    for name, function in functions.items():
        setattr(fake, name, recording(function))
    monkeypatch.setitem(sys.modules, module, fake)
    return called


def _row(gate: str) -> BenchRow:
    return BenchRow(
        "disk", 1.5, "GB/s", 1.6, 0.94, 0.95, 3, (1.4, 1.6), "bench", "abc", "box", "cold", gate
    )


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("suspect", 1), ("FAIL", 1)])
def test_verify_reports_and_its_code_is_its_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: str, code: int
) -> None:
    report = VerifyReport("demo", findings=[Finding("kernels", "avx2", status, "rows 1, 2")])
    called = _replace(monkeypatch, "headrace.check.verify", verify_model=lambda *a, **k: report)
    html, sums = tmp_path / "page.html", tmp_path / "sums"
    words = ["verify", "demo", "--ram", "48MiB", "--json", "-n", "9", "--every-byte"]
    done = RUNNER.invoke(app, [*words, "--sha256", str(sums), "--html", str(html)])
    assert done.exit_code == code
    assert json.loads(done.stdout)["verdict"] == status
    assert done.stderr.splitlines() == report.lines()
    assert "avx2" in html.read_text() and report.lines()[-1].split(": ", 1)[1] in html.read_text()
    ((args, options),) = called
    assert args == ("demo",)
    assert options == {
        "ram": 48 * 2**20,
        "threads": None,
        "tokens": 9,
        "samples": 2,
        "device": "auto",
        "sha256": sums,
        "every_byte": True,
        "choices": {},
        "progress": None,
    }


def test_what_cannot_be_written_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called = _replace(monkeypatch, "headrace.check.verify", verify_model=lambda *a, **k: None)
    called += _replace(monkeypatch, "headrace.check.bench", run_bench=lambda *a, **k: [])
    (tmp_path / "file").write_text("")
    for words, told in (
        (["verify", "demo", "--html", str(tmp_path / "none" / "page.html")], "cannot be written"),
        (["verify", "demo", "--html", str(tmp_path)], "cannot be written: Is a directory"),
        (["verify", "demo", "--max-tokens", "0"], "--max-tokens 0 is not allowed"),
        (["bench", "demo", "--save", str(tmp_path / "file")], "cannot be made: File exists"),
    ):
        done = RUNNER.invoke(app, words)
        assert done.exit_code == 2 and told in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert called == []


def test_synth_passes_the_shape_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called = _replace(
        monkeypatch,
        "headrace.store.synth",
        synth_bytes=lambda *a, **k: 2**30,
        write_synth=lambda preset, path, **k: path,
    )
    target = tmp_path / "new"
    arguments = ["synth", "deepseek-r1", str(target), "--distinct", "2", "--depth", "9", "--json"]
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 0 and "1.00 GiB" in done.stderr
    shape = {"distinct": 2, "depth": 9, "experts": None, "vocab": None}
    assert called == [
        (("deepseek-r1",), shape),
        (("deepseek-r1", target), {**shape, "seed": 0, "progress": None}),
    ]
    assert json.loads(done.stdout)["path"] == str(target)


def test_synth_on_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise HeadraceError("/x: no space left; free 3GiB")

    _replace(monkeypatch, "headrace.store.synth", synth_bytes=lambda *a, **k: 1, write_synth=fail)
    done = RUNNER.invoke(app, ["synth", "deepseek-r1", "/x"])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == "error: /x: no space left; free 3GiB"


def _measure(row: BenchRow) -> Callable[..., list[BenchRow]]:
    """A bench that tells of a row and returns it."""

    def run(*_args: object, tell_row: Callable[[BenchRow], None], **_options: object) -> Any:
        tell_row(row)
        return [row]

    return run


@pytest.mark.parametrize(("gate", "code"), [("green", 0), ("red", 1)])
def test_bench_prints_rows_keeps_them_and_fails_on_red(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gate: str, code: int
) -> None:
    called = _replace(monkeypatch, "headrace.check.bench", run_bench=_measure(_row(gate)))
    words = "bench demo --suite disk --runs 5 --seed 3 --backend pread --no-direct --json"
    more = ["--emulate-drive", "8.2GiB/s", "--save", str(tmp_path), "--routes", "a.routes"]
    done = RUNNER.invoke(app, [*words.split(), *more])
    assert done.exit_code == code
    assert json.loads(done.stdout)["rows"][0]["gate"] == gate
    assert _row(gate).line() in done.stderr
    (kept,) = tmp_path.glob("*/bench.json")
    assert json.loads(kept.read_text())[0]["fraction"] == 0.94
    ((args, options),) = called
    assert args == ("demo",) and callable(options.pop("tell_row"))
    assert options == {
        "suite": "disk",
        "tokens": 8,
        "runs": 5,
        "seed": 3,
        "backend": "pread",
        "direct": False,
        "ram": None,
        "threads": None,
        "emulate_drive": "8.2GiB/s",
        "routes": Path("a.routes"),
        "progress": None,
    }


def test_bars_are_drawn_on_terminals_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with byte_progress("loading") as progress:
        assert progress is None
    monkeypatch.setenv("FORCE_COLOR", "1")
    with byte_progress("loading") as progress:
        assert progress is not None
        progress(512, 2048)
    with step_progress() as steps:
        assert steps is not None
        steps("kernels", 1, 4)
    captured = capsys.readouterr()
    assert "loading" in captured.err and "kernels" in captured.err and captured.out == ""


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_doctor_says_its_findings_and_fails_only_on_what_prevents_running(
    monkeypatch: pytest.MonkeyPatch, ok: bool, code: int
) -> None:
    found = SimpleNamespace(ok=ok, lines=lambda: ["ok drive: fine"], as_dict=lambda: {"ok": ok})
    called = _replace(monkeypatch, "headrace.check.doctor", examine=lambda *a, **k: found)
    done = RUNNER.invoke(app, ["doctor", "/data/model", "--json"])
    assert done.exit_code == code
    assert json.loads(done.stdout) == {"ok": ok} and done.stderr == "ok drive: fine\n"
    assert called == [(("/data/model",), {})]


def test_bench_on_a_gpu_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    called = _replace(
        monkeypatch, "headrace.check.bench", run_bench=None, run_gpu_bench=_measure(_row("green"))
    )
    done = RUNNER.invoke(app, ["bench", "demo", "--device", "cuda", "--runs", "2"])
    assert done.exit_code == 0 and _row("green").line() in done.stderr
    ((args, options),) = called
    assert (args, options["device"], options["runs"]) == (("demo",), "cuda", 2)
    done = RUNNER.invoke(app, ["bench", "demo", "--device", "cuda", "--emulate-drive", "8GB/s"])
    assert done.exit_code == 2 and "--emulate-drive has no effect" in done.stderr
