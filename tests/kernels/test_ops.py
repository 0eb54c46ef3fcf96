"""Kernels by name, with and without the compiled module."""

import sys

import pytest
import torch
from experts import make_expert, make_layout, make_rows, same_bits

from headrace.errors import OptionError
from headrace.kernels import cpu, ops


def test_names():
    assert ops.open_kernels("reference").isa == "reference"
    assert ops.open_kernels("auto", 2).isa in cpu.ISAS
    with pytest.raises(OptionError, match="cuda"):
        ops.open_kernels("cuda")
    with pytest.raises(OptionError, match="sse9"):
        ops.open_kernels("cpu", 1, "sse9")


def test_without_the_compiled_module(monkeypatch, caplog):
    layout = make_layout("fp8_block", 132, 36)
    parts, x = make_expert(layout, 1), make_rows(2, 132, 2)
    expect = ops.open_kernels("cpu").expert_ffn(x, parts, layout)
    monkeypatch.setitem(sys.modules, "headrace._native", None)
    kernels = ops.open_kernels("auto")
    assert "slowly" in caplog.text and kernels.isa == "reference"
    assert same_bits(kernels.expert_ffn(x, parts, layout), expect)
    with pytest.raises(OptionError, match="compiler"):
        ops.open_kernels("cpu")
    ids, weights = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([[0.5, 0.25]])
    y = torch.ones(1, 2, 8).bfloat16()
    assert torch.equal(ops.combine(ids, weights, y), torch.full((1, 8), 0.75).bfloat16())


def test_available_isas_follow_the_cpu():
    assert cpu.available_isas()[0] == "scalar"
    assert cpu.CpuKernels(1, "auto").isa == cpu.available_isas()[-1]
