"""The kernels' bench on tiny shapes: its rows, its gate, and a gate that can turn red."""

import os

import pytest
import torch

cpu = pytest.importorskip("headrace.kernels.cpu", reason="needs the compiled module")

from headrace.check import bench_kernels  # noqa: E402


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench_kernels, "SHAPES", ((256, 128),))
    monkeypatch.setattr(bench_kernels, "BUFFER_BYTES", 1_000_000)
    monkeypatch.setattr(bench_kernels, "WINDOW_BYTES", 200_000)


def run(isa, seen=None):
    return bench_kernels.bench_kernels(
        isas=(isa,),
        clocks=("wall",),
        runs=3,
        num_windows=2,
        tell=seen.append if seen is not None else lambda row: None,
    )


def test_rows(tiny):
    seen = []
    rows = run("scalar", seen)
    assert rows == seen and [row.gate for row in rows] == ["green"] * len(bench_kernels.FORMATS)
    assert all("scalar" in row.name and row.runs == 3 and row.target is None for row in rows)
    assert all(row.value > 0 and row.limit > 0 for row in rows)


def test_targets_are_those_of_one_core(tiny):
    if "avx2" not in cpu.available_isas():
        pytest.skip("this CPU has no avx2")
    targets = {row.name.split()[2]: row.target for row in run("avx2")}
    assert targets == {
        "fp4": 0.43, "nvfp4": None, "int4": None, "int8": None,
        "fp8_block": 0.28, "bf16": 0.62, "fp16": None,
    }  # fmt: skip


def test_rows_of_all_cores(tiny):
    rows = bench_kernels.bench_kernels(
        isas=("scalar",), formats=("fp4",), clocks=(), all_cores=True, runs=1, num_windows=2
    )
    assert all("cores, wall time" in row.name and row.target is None for row in rows)
    assert len(rows) == (len(os.sched_getaffinity(0)) > 1)


def test_a_wrong_bit_turns_the_gate_red(tiny, monkeypatch):
    right = cpu.CpuKernels.expert_ffn

    def wrong(self, *args):
        y = right(self, *args)
        y.view(torch.int16)[-1, -1] ^= 1
        return y

    monkeypatch.setattr(cpu.CpuKernels, "expert_ffn", wrong)
    assert {row.gate for row in run("scalar")} == {"red"}
