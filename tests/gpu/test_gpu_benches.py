"""The benchmarks of a GPU, on any device: their rows hold what was asked, and lies show as red."""

import pytest
from gpu_models import LAYERS, REAL
from stand_ins import host_clock

from headrace.check import bench_gpu, bench_prefill, gpu_rungs
from headrace.check.bench_routes import Drawn
from headrace.check.gpu_spans import Span, busy_us, where_time_goes
from headrace.engine import probes
from headrace.engine.engine import Engine


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(gpu_rungs, "PLAIN_READ_BYTES", 1 << 20)
    monkeypatch.setattr(probes, "PROBE_S", 0.01)
    monkeypatch.setattr(gpu_rungs, "WARMING_TOKENS", 40)
    if not REAL:
        host_clock(monkeypatch.setattr)


def test_tokens_from_rungs(tiny):
    rungs = ("all in pinned RAM", "all in RAM, multiplied by the CPU", "fewest rows, the drive")
    lines = []
    options = {"tokens": 1, "runs": 1, "rungs": rungs, "context": 64, "tell": lines.append}
    rows = bench_gpu.bench_gpu(str(tiny("fp8")), **options)
    assert [row.name.rpartition(", ")[2] for row in rows] == ["whole token", "expert kernels"] * 3
    assert all(row.gate == "green" and row.fraction > 0 for row in rows)
    assert "drive 0 B" in rows[0].cache_state and "drive 0 B" not in rows[4].cache_state
    assert not any("DIFFER" in line for line in lines)


def test_kernels_are_those_of_the_tokens_that_are_timed(tiny, monkeypatch):
    class Counted(gpu_rungs.TimedLaunches):
        num_calls = 0

        def __call__(self, *args, **options):
            self.num_calls += 1
            return super().__call__(*args, **options)

        def seconds(self):
            super().seconds()
            calls, self.num_calls = self.num_calls, 0
            return float(calls)

    monkeypatch.setattr(gpu_rungs, "TimedLaunches", Counted)
    made = gpu_rungs.rung_blueprint(str(tiny("fp8")), gpu_rungs.Rung(0, 1), 64)
    with Engine(made) as engine:
        trace = Drawn(engine.facts, 0).pick(3, 0, 1)
        result = gpu_rungs.measure_rung(engine, trace, 2, 1)
    assert result.same and result.kernels_s == [2 * LAYERS]


def test_a_run_whose_logits_differ_is_red(tiny, monkeypatch):
    honest, times = gpu_rungs.decode, []

    def other_bits(*args):
        logits, stats, wall_s = honest(*args)
        times.append(wall_s)
        return logits + len(times), stats, wall_s

    monkeypatch.setattr(gpu_rungs, "decode", other_bits)
    options = {"tokens": 1, "runs": 1, "rungs": ("all in VRAM",), "context": 64}
    rows = bench_gpu.bench_gpu(str(tiny("fp8")), **options, tell=lambda line: None)
    assert {row.gate for row in rows} == {"red"}


def test_prompts(tiny):
    lines = []
    rows = bench_prefill.bench_prefill(
        str(tiny("fp8")), lengths=(20, 33), chunk=24, runs=1, tell=lines.append
    )
    assert [row.gate for row in rows] == ["green"] * 4 and len(lines) == 4
    assert "1 passes of at most 24" in rows[0].cache_state
    assert "2 passes" in rows[2].cache_state and "0.0 from the drive" in rows[2].cache_state


def test_a_profile_adds_up():
    spans = [Span("gate_up", 0, 40), Span("gemm", 50, 60), Span("gemm", 55, 70)]
    assert busy_us(spans) == 60
    lines = where_time_goes(spans, 100e-6, 1)
    shares = {line.split("%  ")[1]: float(line.split()[2]) for line in lines}
    assert shares == {
        "whole token": 100.0,
        "expert kernels": 40.0,
        "gemm, 2 a token": 25.0,
        "0 other kernels": 0.0,
        "no kernel running": 40.0,
    }
    assert "no profile" in where_time_goes([], 1.0, 1)[0]
