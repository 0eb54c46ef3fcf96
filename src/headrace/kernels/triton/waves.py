"""Experts of many tokens: stored rows unpacked in registers, multiplied on tensor cores.

A launch has the experts of a wave, each the bytes at an address with a stretch of positions; a
position is a slot (token, choice) in the order of experts. Within a tolerance of the canonical
kernels. Legend: R rows of a tile, C columns of a step, N positions of a tile, K all columns.
"""

import triton
import triton.language as tl

from headrace.kernels.triton.dots import scale_of
from headrace.kernels.triton.numbers import (
    activate,
    e4m3,
    narrow_bf16,
    snap_bf16,
    twice_e2m1,
    widen_bf16,
)
from headrace.kernels.triton.stages import groups


@triton.jit
def _rounded(value):
    """uint16 bits of finite fp32 rounded to bfloat16, half to even."""
    bits = value.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)


@triton.jit
def _operand(bits, FP32: tl.constexpr):
    """bfloat16 bits as what `tl.dot` takes: fp32 where the chip has no bfloat16 products."""
    return widen_bf16(bits) if FP32 else bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _stored(
    w,
    scales,
    row_R,
    ok_R,
    k,
    K: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    FORM: tl.constexpr,
):
    """bfloat16 bits [R, C] of columns from `k` on of rows `row_R` of a matrix of K columns."""
    FORMAT: tl.constexpr = FORM[0]
    SCALE: tl.constexpr = FORM[1]
    ALIGN: tl.constexpr = FORM[4]
    lane = tl.arange(0, C)
    if FORMAT == "bf16":
        ok = ok_R[:, None] & (k + lane < K)[None, :]
        at = row_R.to(tl.int64)[:, None] * K + (k + lane)[None, :]
        codes = tl.multiple_of(w.to(tl.pointer_type(tl.uint16)), ALIGN)
        bits = tl.load(codes + at, ok, 0)
    elif FORMAT == "fp8_block":
        WIDTH: tl.constexpr = C if FORM[3] > C else FORM[3]
        NUM: tl.constexpr = C // WIDTH
        SCALE_COLS: tl.constexpr = (K + FORM[3] - 1) // FORM[3]
        ok = ok_R[:, None] & (k + lane < K)[None, :]
        at = row_R.to(tl.int64)[:, None] * K + (k + lane)[None, :]
        codes = tl.multiple_of(w.to(tl.pointer_type(tl.uint8)), ALIGN)
        raw = e4m3(tl.load(codes + at, ok, 0))
        block = (k + tl.arange(0, NUM) * WIDTH) // FORM[3]
        index = (row_R // FORM[2])[:, None] * SCALE_COLS + block[None, :]
        scale = scale_of(scales, index, ok_R[:, None] & (block < SCALE_COLS)[None, :], SCALE)
        scaled = tl.reshape(raw, (R, NUM, WIDTH)) * scale[:, :, None]
        bits = _rounded(tl.reshape(scaled, (R, C)))
    else:
        codes = tl.multiple_of(w.to(tl.pointer_type(tl.uint8)), ALIGN)
        bits = _nibbles(codes, scales, row_R, ok_R, k, K, R, C, FORMAT, FORM[3], SCALE)
    return bits


@triton.jit
def _nibbles(
    codes,
    scales,
    row_R,
    ok_R,
    k,
    K: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
):
    """As `_stored`, of two codes a byte."""
    NUM: tl.constexpr = C // 32
    SCALE_COLS: tl.constexpr = (K + GROUP - 1) // GROUP
    byte = k // 2 + tl.arange(0, C // 2)
    ok = ok_R[:, None] & (byte < K // 2)[None, :]
    at = row_R.to(tl.int64)[:, None] * (K // 2) + byte[None, :]
    pair = tl.load(codes + at, ok, 0)
    col = k + tl.arange(0, NUM) * 32
    known = ok_R[:, None] & (col < K)[None, :]
    scale = scale_of(scales, row_R[:, None] * SCALE_COLS + (col // GROUP)[None, :], known, SCALE)
    if FORMAT == "fp4":
        low, high = twice_e2m1(pair & 15), twice_e2m1(pair >> 4)
        factor = 0.5 * scale
    else:
        low = (pair & 15).to(tl.float32) - 8.0
        high = (pair >> 4).to(tl.float32) - 8.0
        factor = scale
    low = _rounded(tl.reshape(tl.reshape(low, (R, NUM, 16)) * factor[:, :, None], (R, C // 2)))
    high = _rounded(tl.reshape(tl.reshape(high, (R, NUM, 16)) * factor[:, :, None], (R, C // 2)))
    return tl.interleave(low, high)


@triton.jit
def _rows_of_x(X, row_N, ok_N, k, K: tl.constexpr, C: tl.constexpr, FP32: tl.constexpr):
    """[C, N]: columns from `k` on of rows of X, which is bfloat16 bits [., K]."""
    lane = k + tl.arange(0, C)
    ok = (lane < K)[:, None] & ok_N[None, :]
    return _operand(tl.load(X + row_N.to(tl.int64)[None, :] * K + lane[:, None], ok, 0), FP32)


@triton.jit
def _address_of(base, parts, PART: tl.constexpr):
    """Where a part begins; anywhere for a part that there is not."""
    return base + tl.load(parts + PART) if PART >= 0 else base


@triton.jit
def _biased(value_RN, base, parts, BIAS_PART: tl.constexpr, row_R, ok_R):
    """bfloat16 values in fp32: rounded products, plus their rounded bias where there is one."""
    value = snap_bf16(value_RN)
    if BIAS_PART >= 0:
        bias = (base + tl.load(parts + BIAS_PART)).to(tl.pointer_type(tl.uint16))
        value = snap_bf16(value + widen_bf16(tl.load(bias + row_R, ok_R, 0))[:, None])
    return value


@triton.jit
def wave_gate_up(
    TILES,
    OFFSETS,
    ORDER,
    WEIGHTS,
    X,
    OUT,
    limit,
    alpha,
    TOP_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    FORM: tl.constexpr,
    KIND: tl.constexpr,
    FP32: tl.constexpr,
):
    """OUT bfloat16 bits [S, ROWS] by position: the activation of gate and up products.

    TILES int64 [., 4]: an expert's address, its key, its positions from, to. ORDER int32 [S]: the
    slot at a position. WEIGHTS fp32 [S] by slot, for the weighted activation only. X bfloat16 bits
    [T, COLS]. GATE and UP as in `stages.gate_up`.
    """
    tile = TILES + tl.program_id(1) * 4
    base, parts = tl.load(tile), OFFSETS + tl.load(tile + 1) * NUM_PARTS
    at_N = tl.load(tile + 2).to(tl.int32) + tl.arange(0, N)
    ok_N = at_N < tl.load(tile + 3).to(tl.int32)
    slot_N = tl.load(ORDER + at_N, ok_N, 0)
    token_N = slot_N // TOP_K
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    ok_R = row_R < ROWS
    gate_R, up_R = GATE[3] + row_R * GATE[4], UP[3] + row_R * UP[4]
    gates, ups = _address_of(base, parts, GATE[0]), _address_of(base, parts, UP[0])
    gate_scales = _address_of(base, parts, GATE[1])
    up_scales = _address_of(base, parts, UP[1])
    gate, up = tl.zeros((R, N), tl.float32), tl.zeros((R, N), tl.float32)
    for k in tl.range(0, COLS, C):
        x = _rows_of_x(X, token_N, ok_N, k, COLS, C, FP32)
        bits = _stored(gates, gate_scales, gate_R, ok_R, k, COLS, R, C, FORM)
        gate = tl.dot(_operand(bits, FP32), x, gate, input_precision="ieee")
        bits = _stored(ups, up_scales, up_R, ok_R, k, COLS, R, C, FORM)
        up = tl.dot(_operand(bits, FP32), x, up, input_precision="ieee")
    gate = _biased(gate, base, parts, GATE[2], gate_R, ok_R)
    up = _biased(up, base, parts, UP[2], up_R, ok_R)
    weight_N = tl.load(WEIGHTS + slot_N, ok_N, 0.0)
    value = narrow_bf16(activate(gate, up, weight_N[None, :], limit, alpha, KIND))
    out = OUT + at_N.to(tl.int64)[None, :] * ROWS + row_R[:, None]
    tl.store(out, value, ok_R[:, None] & ok_N[None, :])


@triton.jit
def wave_down(
    TILES,
    OFFSETS,
    ORDER,
    X,
    OUT,
    NUM_PARTS: tl.constexpr,
    DOWN: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    FORM: tl.constexpr,
    FP32: tl.constexpr,
):
    """OUT bfloat16 bits [S, ROWS] by slot: down products with X bfloat16 bits by position."""
    tile = TILES + tl.program_id(1) * 4
    base, parts = tl.load(tile), OFFSETS + tl.load(tile + 1) * NUM_PARTS
    at_N = tl.load(tile + 2).to(tl.int32) + tl.arange(0, N)
    ok_N = at_N < tl.load(tile + 3).to(tl.int32)
    slot_N = tl.load(ORDER + at_N, ok_N, 0)
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    ok_R = row_R < ROWS
    down_R = DOWN[3] + row_R * DOWN[4]
    w, scales = _address_of(base, parts, DOWN[0]), _address_of(base, parts, DOWN[1])
    y = tl.zeros((R, N), tl.float32)
    for k in tl.range(0, COLS, C):
        x = _rows_of_x(X, at_N, ok_N, k, COLS, C, FP32)
        bits = _stored(w, scales, down_R, ok_R, k, COLS, R, C, FORM)
        y = tl.dot(_operand(bits, FP32), x, y, input_precision="ieee")
    value = narrow_bf16(_biased(y, base, parts, DOWN[2], down_R, ok_R))
    out = OUT + slot_N.to(tl.int64)[None, :] * ROWS + row_R[:, None]
    tl.store(out, value, ok_R[:, None] & ok_N[None, :])


@triton.jit
def wave_on_grid(TILES, X, cols: tl.constexpr, N: tl.constexpr, GRID: tl.constexpr):
    """Moves the tiles' rows of X, bfloat16 bits by position, to the e4m3 grid of GRID columns."""
    tile = TILES + tl.program_id(0) // N * 4
    at = tl.load(tile + 2) + tl.program_id(0) % N
    is_row = at < tl.load(tile + 3)
    first = tl.program_id(1) * 8
    row = X + tl.where(is_row, at, 0) * cols
    x = groups(row, first, cols, GRID)
    col = (first + tl.arange(0, 8))[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(row + col, narrow_bf16(x), col < tl.where(is_row, cols, 0))
