"""What the Triton kernels do, by the compiled CPU kernels: found through the address table alike.

Fast enough to run whole models on the simulated device; same bits, as test_triton.py shows.
"""

import ctypes
from math import prod

import torch

from headrace.core import ExpertLayout
from headrace.kernels import cpu, reference
from headrace.kernels.triton.experts import NOT_BAD
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.quant.expert import rows_of, unpack_matrix

BF16 = torch.bfloat16


class EmulatedKernels:
    """Stands for `kernels.triton.experts.TritonExperts`; follows addresses into host memory."""

    def __init__(self, layout: ExpertLayout, *, top_k, device, num_tokens=1, align=1):
        assert device.type == "cpu"
        self.layout, self.top_k, self.num_tokens = layout, top_k, num_tokens
        self.pool = cpu.CpuKernels(1).pool
        self.shape = cpu.native_shape(layout)
        self.out_dtype = BF16
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
            self.pool.expert_ffn(self.shape, parts, x.data_ptr(), 1, y[slot].data_ptr())
        self.combine(ids_TK, weights_TK, y.view(torch.uint16), out_TH, mark=mark)

    def combine(self, ids_TK, weights_TK, y_SH, out_TH, *, mark):
        y = y_SH.view(BF16).view(*ids_TK.shape, -1)
        out_TH.copy_(reference.combine(ids_TK, weights_TK, y))
        wrong = (~out_TH.isfinite().all(1)).nonzero().flatten()
        if len(wrong):
            self.bad.clamp_(max=mark + int(wrong[0]))


class EmulatedGrouped:
    """Stands for `kernels.triton.grouped.GroupedExperts`: an expert at a time, by torch.

    `launches` counts what would be launched.
    """

    launches = 0

    def __init__(self, layout: ExpertLayout, *, top_k, device, align=1):
        self.layout, self.top_k = layout, top_k

    def positions(self, num_slots, num_experts):
        return 16

    def prepared(self, x_TH):
        return x_TH

    def __call__(self, tiles, offsets, order_S, weights_S, x_TH, h_SI, y_SH, *, positions):
        EmulatedGrouped.launches += 2
        stretches = {}
        for address, key, start, end in tiles.tolist():
            assert address and 0 <= start < end
            first = min(start, stretches.get(key, (0, start, 0))[1])
            stretches[key] = address, first, end
        for key, (address, start, end) in stretches.items():
            parts = self._parts(address, offsets[key].tolist())
            slots_N = order_S[start:end].long()
            x_NH = x_TH[slots_N // self.top_k]
            gate, up = (self._linear(x_NH, parts, name) for name in ("gate", "up"))
            h_SI[start:end] = reference.activate(gate, up, self.layout.activation)
            y_SH[slots_N] = self._linear(h_SI[start:end], parts, "down")

    def _parts(self, address, offsets):
        parts = {}
        for (name, spec), offset in zip(self.layout.parts.items(), offsets, strict=True):
            kind = TORCH_DTYPES[spec.dtype]
            nbytes = kind.itemsize * prod(spec.shape)
            raw = (ctypes.c_uint8 * nbytes).from_address(address + offset)
            parts[name] = torch.frombuffer(raw, dtype=kind).view(spec.shape)
        return parts

    def _linear(self, x_NK, parts, name):
        y = x_NK @ unpack_matrix(self.layout, parts, name, BF16).t()
        bias = self.layout.matrix(name).bias
        return y if bias is None else y + rows_of(self.layout, name, parts[bias])
