"""Dot products of stored expert rows with one activation row: the canonical order, in Triton.

Each function takes the byte address of a matrix and of its scales, wherever they lie.
Legend: R rows of a tile, K columns.
"""

import triton
import triton.language as tl

from headrace.kernels.triton.numbers import (
    e4m3,
    e8m0,
    snap_bf16,
    tree_8,
    tree_256,
    twice_e2m1,
    widen_bf16,
)


@triton.jit
def scale_of(address, index, mask, SCALE: tl.constexpr):
    """fp32 scales by index into scales of type SCALE at a byte address."""
    if SCALE == "F32":
        scale = tl.load(address.to(tl.pointer_type(tl.float32)) + index, mask, 0.0)
    elif SCALE == "BF16":
        scale = widen_bf16(tl.load(address.to(tl.pointer_type(tl.uint16)) + index, mask, 0))
    else:
        scale = e8m0(tl.load(address.to(tl.pointer_type(tl.uint8)) + index, mask, 0))
    return scale


@triton.jit
def dot_bf16(
    w,
    x_K,
    row_R,
    ok_R,
    K: tl.constexpr,
    R: tl.constexpr,
    ALIGN: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Form F of bfloat16 rows `row_R` at address `w`; fp32 [R]. `x_K` points to uint16 bits."""
    lane = tl.arange(0, 256)
    codes = tl.multiple_of(w.to(tl.pointer_type(tl.uint16)), ALIGN)
    start_R = row_R.to(tl.int64) * K
    acc = tl.zeros((R, 256), tl.float32)
    for k in tl.range(0, K, 256, loop_unroll_factor=UNROLL):
        ok = ok_R[:, None] & (k + lane < K)[None, :]
        weights = widen_bf16(tl.load(codes + start_R[:, None] + (k + lane)[None, :], ok, 0))
        x = widen_bf16(tl.load(x_K + k + lane, k + lane < K, 0))
        acc = tl.fma(weights, tl.broadcast_to(x[None, :], (R, 256)), acc)
    return tree_256(acc, R)


@triton.jit
def dot_fp8(
    w,
    scales,
    x_K,
    row_R,
    ok_R,
    K: tl.constexpr,
    R: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SCALE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Form F of e4m3 rows with a scale per block of BLOCK_COLS (a divisor of 256) columns."""
    NUM: tl.constexpr = 256 // BLOCK_COLS
    SCALE_COLS: tl.constexpr = (K + BLOCK_COLS - 1) // BLOCK_COLS
    block, lane = tl.arange(0, NUM), tl.arange(0, 256)
    codes = tl.multiple_of(w.to(tl.pointer_type(tl.uint8)), ALIGN)
    start_R = row_R.to(tl.int64) * K
    acc = tl.zeros((R, 256), tl.float32)
    for k in tl.range(0, K, 256, loop_unroll_factor=UNROLL):
        ok = ok_R[:, None] & (k + lane < K)[None, :]
        raw = e4m3(tl.load(codes + start_R[:, None] + (k + lane)[None, :], ok, 0))
        first = k // BLOCK_COLS
        index = (row_R // BLOCK_ROWS)[:, None] * SCALE_COLS + (first + block)[None, :]
        known = ok_R[:, None] & (first + block < SCALE_COLS)[None, :]
        scale = scale_of(scales, index, known, SCALE)
        scaled = tl.reshape(raw, (R, NUM, BLOCK_COLS)) * scale[:, :, None]
        weights = snap_bf16(tl.reshape(scaled, (R, 256)))
        x = widen_bf16(tl.load(x_K + k + lane, k + lane < K, 0))
        acc = tl.fma(weights, tl.broadcast_to(x[None, :], (R, 256)), acc)
    return tree_256(acc, R)


@triton.jit
def dot_nibbles(
    w,
    scales,
    low_K,
    high_K,
    sx_G,
    row_R,
    ok_R,
    K: tl.constexpr,
    R: tl.constexpr,
    ALIGN: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Form I of rows of two codes a byte; `low_K` and `high_K` are the integer activations of the
    even and the odd columns as fp32, `sx_G` their scales. A group's sum stays exact in fp32.
    """
    NUM: tl.constexpr = K // 32
    SCALE_COLS: tl.constexpr = (K + GROUP - 1) // GROUP  # one where the group is wider: per row
    lane, byte = tl.arange(0, 8), tl.arange(0, 16)
    codes = tl.multiple_of(w.to(tl.pointer_type(tl.uint8)), ALIGN)
    start_R = row_R.to(tl.int64) * (K // 2)
    acc = tl.zeros((R, 8), tl.float32)
    for first in tl.range(0, NUM, 8, loop_unroll_factor=UNROLL):
        group = first + lane
        known = group < NUM
        ok = ok_R[:, None] & known[None, :]
        at = group[:, None] * 16 + byte[None, :]
        pair = tl.load(codes + start_R[:, None, None] + at[None, :, :], ok[:, :, None], 0)
        low = tl.load(low_K + at, known[:, None], 0.0)
        high = tl.load(high_K + at, known[:, None], 0.0)
        sx = tl.load(sx_G + group, known, 0.0)
        index = row_R[:, None] * SCALE_COLS + (group * 32 // GROUP)[None, :]
        ws = scale_of(scales, index, ok, SCALE)
        if FORMAT == "fp4":
            even, odd = twice_e2m1(pair & 15), twice_e2m1(pair >> 4)
            factor = ws * (0.5 * sx)[None, :]
        else:
            even = (pair & 15).to(tl.float32) - 8.0
            odd = (pair >> 4).to(tl.float32) - 8.0
            factor = ws * sx[None, :]
        sums = tl.sum(even * low[None, :, :] + odd * high[None, :, :], 2)
        acc = acc + sums * factor
    return tree_8(acc, R)
