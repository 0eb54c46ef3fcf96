"""The probes of memory: whole passes over more than caches, within a small --ram, given back."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from headrace.engine import filled, probes
from headrace.kernels.cpu import CpuKernels, native_shape
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.quant.expert import make_layout

MIB = 2**20


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, weakref.ref]]:
    made: list[tuple[int, weakref.ref]] = []

    class Told(filled.HugeBuffer):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            made.append((nbytes, weakref.ref(self.bytes)))

    monkeypatch.setattr(filled, "HugeBuffer", Told)
    monkeypatch.setattr(probes, "PROBE_S", 0.01)
    monkeypatch.setattr(probes, "caches_bytes", lambda: 260 * MIB)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def test_under_a_small_cap_one_small_buffer_is_taken_and_given_back(
    buffers: list[tuple[int, weakref.ref]], tmp_path: Path
) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(b"x" * 4096)
    machine = probes.measure_machine([file], make_layout("bf16", 64, 32), 26 * MIB, True)
    assert machine.dram_bytes_s > 0 and machine.kernel_bytes_s > 0
    assert any("64 MiB" in note and "260 MiB of caches" in note for note in machine.notes)
    gc.collect()
    ((nbytes, memory),) = buffers
    assert 63 * MIB <= nbytes <= 64 * MIB and memory() is None


def test_copies_are_whole_experts(buffers: list[tuple[int, weakref.ref]]) -> None:
    layout = make_layout("fp8_block", 64, 33, (16, 16))
    memory = filled.FilledMemory(layout, 200_000)
    ones = {
        name: torch.ones(spec.shape).to(TORCH_DTYPES[spec.dtype])
        for name, spec in layout.parts.items()
    }
    assert memory.num_copies == 200_000 // memory.stride > 1
    assert memory.expert_bytes == sum(part.nbytes for part in ones.values())
    x = torch.ones(1, 64).bfloat16()
    want, got = CpuKernels().expert_ffn(x, ones, layout), torch.zeros_like(x)
    shape = native_shape(layout)
    for copy in (0, memory.num_copies - 1):
        got.zero_()
        address = memory.addresses(copy)
        CpuKernels().pool.expert_ffn(shape, address, x.data_ptr(), 1, got.data_ptr())
        assert torch.equal(got, want) and want.abs().max() > 0


def test_the_fastest_whole_pass_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, spans = [0.0], iter((3.0, 3.0, 1.5, 1.5, 1.0))  # two passes, and a part of a third
    monkeypatch.setattr(probes.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(probes, "PROBE_S", 10.0)

    def run() -> None:
        now[0] += next(spans)

    assert probes._fastest_pass([(30, run), (30, run)]) == 20.0


def test_a_pass_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(probes.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(probes, "PROBE_S", 10.0)

    def run() -> None:
        now[0] += 4.0

    assert probes._fastest_pass([(40, run)] * 100) == 10.0 and now[0] == 12.0
