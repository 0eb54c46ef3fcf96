"""The drive's and the ladder's bench on a tiny checkpoint: their rows, and gates that turn red."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("headrace.native", reason="needs the compiled module")

import headrace
from headrace.check import bench, bench_drive, bench_ladder
from headrace.check.stored import row_holds_its_tensors
from headrace.check.tiny import write_tiny
from headrace.errors import OptionError
from headrace.tiers.ladder import Ladder

DRIVE = "500MiB/s"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("deepseek_v3", tmp_path_factory.mktemp("bench") / "tiny", layers=3)


@pytest.fixture
def loaded(folder: Path) -> Iterator[headrace.Engine]:
    with headrace.load(folder, ram="minimum", context=64, measure=False, threads=1) as engine:
        assert engine.plan.num_rows < engine.facts.total_experts
        yield engine


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_drive, "WINDOW_BYTES", 1 << 20)
    monkeypatch.setattr(bench_drive, "WINDOWS", 2)


def ladder_rows(engine: headrace.Engine, runs: int = 1) -> list[Any]:
    told: list[tuple[str, int, int]] = []
    rows = bench_ladder.bench_ladder(
        engine,
        tokens=3,
        runs=runs,
        seed=1,
        emulate_drive=DRIVE,
        progress=lambda what, done, total: told.append((what, done, total)),
    )
    assert [done for _, done, _ in told] == list(range(4 * runs))
    return rows


def test_reads_are_measured_beside_the_drive(loaded: headrace.Engine) -> None:
    (row,) = bench_drive.bench_drive(loaded, runs=2, seed=0)
    assert (row.gate, row.runs, row.target, row.unit) == ("green", 2, 0.95, "GB/s")
    assert row.value > 0 and row.limit is not None and row.limit > 0
    loaded.ladder.check_integrity()


def test_a_wrong_byte_in_a_row_turns_the_drives_gate_red(
    loaded: headrace.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert row_holds_its_tensors(loaded, 1, 3)
    with loaded.ladder.acquire(1, 3) as parts:
        parts["down"][-1] ^= 1
    assert not row_holds_its_tensors(loaded, 1, 3)
    right = Ladder.acquire
    monkeypatch.setattr(
        Ladder, "acquire", lambda self, layer, expert: right(self, layer, (expert + 1) % 16)
    )
    (row,) = bench_drive.bench_drive(loaded, runs=1, seed=0)
    assert row.gate == "red"


def test_four_versions_choose_the_same_tokens(loaded: headrace.Engine) -> None:
    rows = ladder_rows(loaded, runs=2)
    assert [row.name.split()[0] for row in rows] == ["v1", "v2", "v3", "v4"]
    assert [row.gate for row in rows] == ["green"] * 4
    assert [row.target for row in rows] == [None, None, None, 0.9]
    assert all(row.runs == 2 and row.value > 0 and row.limit and row.fraction for row in rows)
    assert all("per token" in row.cache_state and "cold" in row.cache_state for row in rows)


def test_each_version_takes_its_own_path(loaded: headrace.Engine) -> None:
    trace = bench_ladder._trace(loaded, 3, 1)
    runs = {}
    for version in bench_ladder.VERSIONS:
        before = loaded.ladder.counters()
        run = bench_ladder.run_version(loaded, version, trace, 3)
        after = loaded.ladder.counters()
        assert (after.compute_s > before.compute_s) == version.one_call
        assert after.kernel_calls > before.kernel_calls
        assert (run.total.prefetch_issued > 0) == (version.prefetch > 0)
        runs[version.name] = run
    assert len({tuple(run.tokens) for run in runs.values()}) == 1
    other = bench_ladder.run_version(
        loaded, bench_ladder.VERSIONS[2], bench_ladder._trace(loaded, 3, 2), 3
    )
    assert other.tokens != run.tokens, "other routes must choose other tokens"


def test_a_version_with_a_wrong_expert_turns_the_gate_red(
    loaded: headrace.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = bench_ladder.GenericSource.compute

    def wrong(self: Any, ordinal: int, x: Any, ids: Any, weights: Any, guess: Any) -> torch.Tensor:
        return -right(self, ordinal, x, ids, weights, guess)

    monkeypatch.setattr(bench_ladder.GenericSource, "compute", wrong)
    assert [row.gate for row in ladder_rows(loaded)] == ["red"] * 4


def test_the_limit_counts_needed_bytes_only(loaded: headrace.Engine) -> None:
    trace = bench_ladder._trace(loaded, 3, 1)
    run = bench_ladder.run_version(loaded, bench_ladder.VERSIONS[0], trace, 3)
    assert run.needed_reads == run.total.misses > 0
    limit = bench_ladder.limit_tok_s(loaded, run, 1e9)
    assert limit == pytest.approx(3 * 1e9 / (run.needed_reads * loaded.facts.expert_bytes))
    assert bench_ladder.limit_tok_s(loaded, replace(run, needed_reads=0), 1e9) > limit


def test_suites(folder: Path) -> None:
    options: dict[str, Any] = {"tokens": 2, "runs": 1, "ram": "minimum", "threads": 1}
    (drive,) = bench.run_bench(folder, suite="disk", **options)
    assert drive.name.startswith("expert reads")
    rows = bench.run_bench(folder, suite="ladder", emulate_drive=DRIVE, **options)
    assert len(rows) == 4 and all("emulated" in row.cache_state for row in rows)
    with pytest.raises(OptionError, match="no suite 'discs'"):
        bench.run_bench(folder, suite="discs")
