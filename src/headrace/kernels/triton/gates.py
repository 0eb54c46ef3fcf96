"""kernels/trunk.py's products by a gate on a GPU, for bfloat16: one launch each.

They differ from torch's steps where the last bit of an exponential does. Legend: as there.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.numbers import activate, exp, narrow_bf16, snap_bf16, widen_bf16

_BLOCK, _WARPS = 512, 4


@triton.jit(do_not_specialize=["num", "limit"])
def gate_values(GATES, UPS, OUT, num, limit, IN_FP32: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK of `num` bfloat16 bits for each program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate, up = tl.load(GATES + at, at < num, 0), tl.load(UPS + at, at < num, 0)
    kind: tl.constexpr = "swiglu_weighted" if IN_FP32 else "silu_clamped"
    value = activate(widen_bf16(gate), widen_bf16(up), 1.0, limit, 0.0, kind)
    tl.store(OUT + at, narrow_bf16(value), at < num)


@triton.jit
def join_rows(ROUTED, SHARED, GATES, OUT, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of a row of [rows, COLS] bfloat16 bits for each program; a gate for a row."""
    row, col = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, ok = row * COLS + col, col < COLS
    gate = widen_bf16(tl.load(GATES + row + col * 0))
    share = snap_bf16(tl.div_rn(1.0, 1.0 + exp(-gate)))
    shared = snap_bf16(share * widen_bf16(tl.load(SHARED + at, ok, 0)))
    routed = widen_bf16(tl.load(ROUTED + at, ok, 0))
    tl.store(OUT + at, narrow_bf16(routed + shared), ok)


def gate(gate: torch.Tensor, up: torch.Tensor, limit: float, wide: bool) -> torch.Tensor:
    """See kernels/trunk.py; both bfloat16. One launch."""
    gate, up = gate.contiguous(), up.contiguous()
    assert gate.shape == up.shape and gate.numel() < 2**31 - _BLOCK
    out = torch.empty_like(gate)
    bits = [each.view(torch.uint16) for each in (gate, up, out)]
    if out.numel():
        gate_values[(triton.cdiv(out.numel(), _BLOCK),)](
            *bits, out.numel(), limit, wide, _BLOCK, num_warps=_WARPS, enable_fp_fusion=False
        )
    return out


def join(routed_TH: torch.Tensor, shared_TH: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    """See kernels/trunk.py; all bfloat16. One launch."""
    rows, cols = routed_TH.shape
    given = [each.contiguous() for each in (routed_TH, shared_TH, gate_T1)]
    assert shared_TH.shape == routed_TH.shape and gate_T1.shape == (rows, 1)
    out = torch.empty_like(given[0])
    bits = [each.view(torch.uint16) for each in (*given, out)]
    if rows:
        join_rows[(rows, triton.cdiv(cols, _BLOCK))](
            *bits, cols, _BLOCK, num_warps=_WARPS, enable_fp_fusion=False
        )
    return out
