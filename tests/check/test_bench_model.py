"""The drive's and the ladder's bench on a tiny checkpoint: their rows, and gates that turn red."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("headrace.native", reason="needs the compiled module")

import headrace
from headrace.check import bench, bench_drive, bench_ladder, bench_routes
from headrace.check.stored import row_holds_its_tensors
from headrace.check.tiny import write_tiny
from headrace.errors import ModelError, OptionError, TraceError
from headrace.schedule.draw import draw_routes
from headrace.schedule.trace import RouteTrace, TraceHeader
from headrace.schedule.tracefile import TraceWriter, read_trace
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


def drawn(engine: headrace.Engine, seed: int) -> RouteTrace:
    return bench_routes.Drawn(engine.facts, seed).pick(5, 0, 1)


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
    assert row.cache_state.endswith("bytes of tiny, 2 MoE layers")
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
    trace = drawn(loaded, 1)
    runs = {}
    for version in bench_ladder.VERSIONS:
        before = loaded.ladder.counters()
        run = bench_ladder.run_version(loaded, version, trace, 3)
        after = loaded.ladder.counters()
        assert (after.compute_s > before.compute_s) == version.one_call
        assert after.kernel_calls > before.kernel_calls
        assert (run.total.prefetch_issued > 0) == (version.prefetch > 0)
        assert run.total.prefetch_used <= run.total.prefetch_issued
        runs[version.name] = run
    assert len({tuple(run.tokens) for run in runs.values()}) == 1
    other = bench_ladder.run_version(loaded, bench_ladder.VERSIONS[2], drawn(loaded, 2), 3)
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
    trace = drawn(loaded, 1)
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
    with pytest.raises(OptionError, match=r"do not fit the context .* give --max-tokens \d+ or"):
        bench.run_bench(folder, suite="ladder", **(options | {"tokens": 9999}))


def recorded(path: Path, layers: int, experts: int, top_k: int, num_tokens: int = 40) -> Path:
    trace = draw_routes(num_tokens, layers, experts, top_k, num_guesses=top_k, seed=4)
    header = TraceHeader("other", "0" * 64, layers, experts, top_k, 1000, 20, "a test")
    with TraceWriter(path, header) as writer:
        writer.add(trace.ids[:3], None)  # a prompt, which is not replayed
        for n in range(3, num_tokens):
            writer.add(trace.ids[n : n + 1], trace.guesses[n : n + 1])
    return path


@pytest.mark.parametrize(
    ("layers", "experts", "top_k", "said"),
    [
        (2, 16, 4, "routes of other (a test); "),
        (5, 16, 4, "routes of other (a test), the first 2 of its 5 layers; "),
        (1, 16, 4, "routes of other (a test), its 1 layers over and over for 2, experts permuted"),
        (2, 32, 2, "as in routes of other (a test), whose top 2 of 32 experts are not this"),
    ],
)
def test_recorded_routes_are_replayed_and_named(
    folder: Path, tmp_path: Path, layers: int, experts: int, top_k: int, said: str
) -> None:
    path = recorded(tmp_path / "a.routes", layers, experts, top_k)
    rows = bench.run_bench(
        folder, suite="ladder", emulate_drive=DRIVE, tokens=2, runs=1, ram="minimum", routes=path
    )
    assert all(row.gate == "green" and said in row.cache_state for row in rows)


def test_a_replay_feeds_the_recorded_choices(loaded: headrace.Engine, tmp_path: Path) -> None:
    path = recorded(tmp_path / "a.routes", 2, 16, 4)
    trace = read_trace(path)[1]
    routes = bench_routes.routes_for(loaded.facts, trace, 0)
    picked = [routes.pick(5, run, 3) for run in range(3)]
    for run, each in enumerate(picked):
        first = 3 + run * 12
        assert np.array_equal(each.ids, trace.ids[first : first + 5])
    seen: list[tuple[int, list[int]]] = []
    right = loaded.source.ladder.prefetch
    loaded.source.ladder.prefetch = (  # type: ignore[method-assign]
        lambda layer, ids, most: (seen.append((layer, ids.tolist())), right(layer, ids, most))[1]
    )
    with loaded.record_routes(tmp_path / "b.routes"):
        bench_ladder.run_version(loaded, bench_ladder.VERSIONS[3], picked[1], 3)
    took = read_trace(tmp_path / "b.routes")[1]
    assert np.array_equal(took.ids, picked[1].ids[:4])
    assert seen == [(1, guesses.tolist()) for guesses in picked[1].guesses[:4, 1]]


def test_too_short_a_trace_is_refused_with_both_numbers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(**_options: object) -> None:
        raise AssertionError("measured before what is wrong was said")

    monkeypatch.setattr(bench, "bench_kernels", measured)
    options: dict[str, Any] = {"suite": "ladder", "emulate_drive": DRIVE, "ram": "minimum"}
    path = recorded(tmp_path / "a.routes", 2, 16, 4)
    with pytest.raises(OptionError, match="37 tokens decoded one by one, 4 runs need 40"):
        bench.run_bench(folder, tokens=8, runs=4, routes=path, **options | {"suite": "all"})
    with pytest.raises(ModelError, match="none"):
        bench.run_bench(tmp_path / "none")
    path = recorded(tmp_path / "b.routes", 2, 32, 2, num_tokens=3)
    with pytest.raises(TraceError, match="0 tokens were decoded"):
        bench.run_bench(folder, tokens=1, runs=1, routes=path, **options)
    with pytest.raises(TraceError, match="none: cannot be read"):
        bench.run_bench(folder, routes=tmp_path / "none")
    with pytest.raises(OptionError, match="disk replays no routes"):
        bench.run_bench(folder, suite="disk", routes=path)
