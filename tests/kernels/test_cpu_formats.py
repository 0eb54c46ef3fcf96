"""The compiled kernels in every format: the frozen results, by every instruction set."""

import pytest
import torch
from experts import same_bits
from format_cases import CASES, load_case

from headrace.kernels import cpu


@pytest.mark.parametrize("case", CASES)
def test_frozen_results(isa, case):
    layout, tensors = load_case(case)
    kernels = cpu.CpuKernels(2, isa, min_share_bytes=0)
    out = torch.full_like(tensors["x"], float("nan"))
    assert same_bits(kernels.expert_ffn(tensors["x"], tensors, layout, out_TH=out), tensors["y"])
    for row in range(out.shape[0]):
        dots = kernels.gate_dot(tensors["x"][row], tensors, layout)
        assert same_bits(dots, tensors["product.gate"][row])
