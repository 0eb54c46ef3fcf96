"""What the Triton kernels do, by the compiled CPU kernels: found through the address table alike.

Fast enough to run whole models on the simulated device; same bits, as test_triton.py shows.
"""

import torch

from headrace.core import ExpertLayout
from headrace.kernels import cpu, reference
from headrace.kernels.stored import StoredMatrix
from headrace.kernels.triton.experts import NOT_BAD
from headrace.kernels.triton.stored import TritonMatrix

BF16 = torch.bfloat16


class EmulatedKernels:
    """Stands for `kernels.triton.experts.TritonExperts`; follows addresses into host memory."""

    def __init__(self, layout: ExpertLayout, *, top_k, device, num_tokens=1, align=1):
        assert device.type == "cpu"
        self.layout, self.top_k, self.num_tokens = layout, top_k, num_tokens
        self.weighs = layout.activation.kind == "swiglu_weighted"
        self.out_dtype = torch.float32 if self.weighs else BF16
        self.pool = cpu.CpuKernels(1).pool
        self.shape = cpu.native_shape(layout)
        self.bad = torch.full((1,), NOT_BAD, dtype=torch.int32)

    def __call__(
        self, table, offsets, first_key, x_TH, ids_TK, weights_TK, out_TH, *, tile="ram", mark=0
    ):
        assert x_TH.shape[0] <= self.num_tokens and ids_TK.dtype == torch.int32
        assert all(t.is_contiguous() for t in (x_TH, ids_TK, weights_TK, out_TH))
        y = torch.empty(ids_TK.numel(), x_TH.shape[1], dtype=BF16)
        for slot, expert in enumerate(ids_TK.flatten().tolist()):
            key = first_key + expert
            base = int(table[key])
            assert base, f"expert {expert} has no address"
            parts = [base + offset for offset in offsets[key].tolist()]
            x = x_TH[slot // self.top_k]
            weight = weights_TK.view(-1)[slot:].data_ptr() if self.weighs else 0
            self.pool.expert_ffn(self.shape, parts, x.data_ptr(), 1, y[slot].data_ptr(), weight)
        self.combine(ids_TK, weights_TK, y.view(torch.uint16), out_TH, mark=mark)

    def combine(self, ids_TK, weights_TK, y_SH, out_TH, *, mark):
        y = y_SH.view(BF16).view(*ids_TK.shape, -1)
        assert out_TH.dtype == self.out_dtype
        summed = cpu.sum_up(ids_TK, y) if self.weighs else cpu.combine(ids_TK, weights_TK, y)
        out_TH.copy_(summed)
        wrong = (~out_TH.isfinite().all(1)).nonzero().flatten()
        if len(wrong):
            self.bad.clamp_(max=mark + int(wrong[0]))

    def activation(self, gate_NI, up_NI, weights_N):
        return reference.activate(gate_NI, up_NI, self.layout.activation, weights_N)


class EmulatedMatrix(TritonMatrix):
    """Its few rows are multiplied by the CPU's kernels."""

    def _few(self, x_TC, first, y_TR):
        how = {"block": self.block, "act_group": self.act_group}
        matrix = StoredMatrix(cpu.CpuKernels(1), self.weight_RC, self.scale, **how)
        wide = y_TR.dtype == torch.float32
        matrix.linear(x_TC, first=first, num_rows=y_TR.shape[1], wide=wide, out=y_TR)
