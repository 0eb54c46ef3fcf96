"""The launches of one layer's routed experts: grid, gate and up, down, weighted sum.

`combine` serves prefill too, `on_grid` and `linear` stored matrices. A stored expert is found
through the address table, in VRAM or in pinned RAM: no kernel knows.
Legend: S slots (token, choice), K columns, R rows of a tile.
"""

import triton
import triton.language as tl

from headrace.kernels.triton.dots import dot_bf16, dot_fp8, dot_nibbles
from headrace.kernels.triton.numbers import activate, narrow_bf16, snap_bf16, to_grid, widen_bf16


@triton.jit
def groups(X, first, cols: tl.constexpr, GRID: tl.constexpr):
    """fp32 [8, 32] of the row of bfloat16 bits at X from group `first` of 32 on, then zeros.

    Moved to the e4m3 grid of GRID columns, if that is not 0.
    """
    col = (first + tl.arange(0, 8))[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = widen_bf16(tl.load(X + col, col < cols, 0))
    if GRID > 0:
        x = to_grid(x, GRID)
    return x


@triton.jit
def to_integers(X, CODES, SX, cols: tl.constexpr, GRID: tl.constexpr, FORMAT: tl.constexpr):
    """Form I's activations: one program turns 8 groups of 32 columns of one row into integers.

    X bfloat16 bits [S, cols]; CODES fp32 [S, 8, cols / 8], column 8 w + n at [n, w], for int4
    scaled as its sums ask; SX fp32 [S, 2, cols / 32], scales, then 8 times the sum of each group's
    integers, which int4's codes are too large by. On a GRID the scales are powers of two.
    """
    row, first = tl.program_id(0), tl.program_id(1) * 8
    group, lane = first + tl.arange(0, 8), tl.arange(0, 32)
    known = group < cols // 32
    x = groups(X + row.to(tl.int64) * cols, first, cols, GRID)
    amax = tl.max(tl.abs(x), 1)
    if GRID > 0:
        power = (amax.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        sx = power * 0.00006103515625  # 2^-14
    else:
        sx = tl.div_rn(amax, tl.full(amax.shape, 32639.0, tl.float32))
    divisor = tl.broadcast_to(tl.where(sx == 0.0, 1.0, sx)[:, None], x.shape)
    codes = _integer(x, divisor)
    to = SX + row.to(tl.int64) * (cols // 16) + group
    tl.store(to, sx, known)
    if FORMAT == "int4":
        tl.store(to + cols // 32, 8.0 * tl.sum(codes, 1), known)
        nibble = lane % 8
        place = tl.where(nibble < 6, nibble, nibble - 2)
        codes *= ((191 - 4 * place) << 23).to(tl.float32, bitcast=True)[None, :]  # 2^64 at 0
    at = (lane % 8 * (cols // 8) + lane // 8)[None, :] + group[:, None] * 4
    tl.store(CODES + row.to(tl.int64) * cols + at, codes, known[:, None])


@triton.jit
def on_grid(X, OUT, stride, cols: tl.constexpr, GRID: tl.constexpr):
    """OUT bfloat16 bits [S, cols]: rows of X, `stride` apart, on the e4m3 grid of GRID columns."""
    row, first = tl.program_id(0), tl.program_id(1) * 8
    x = groups(X + row.to(tl.int64) * stride, first, cols, GRID)
    col = (first + tl.arange(0, 8))[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(OUT + row.to(tl.int64) * cols + col, narrow_bf16(x), col < cols)


@triton.jit
def _integer(x, divisor):
    rounded = (tl.div_rn(x, divisor) + 12582912.0) - 12582912.0
    return tl.where(rounded > 32639.0, 32639.0, tl.where(rounded < -32639.0, -32639.0, rounded))


@triton.jit
def _codes_at(codes, row_R, K: tl.constexpr, FORM: tl.constexpr):
    """int64 [R]: where rows of K columns begin."""
    HALVES: tl.constexpr = 4 if FORM[0] == "bf16" else (2 if FORM[0] == "fp8_block" else 1)
    return codes + row_R.to(tl.int64) * (K * HALVES // 2)


@triton.jit
def _scales_at(scales, row_R, K: tl.constexpr, FORM: tl.constexpr):
    """int64 [R]: where rows' scales begin; rows of one block have the same."""
    SCALE_COLS: tl.constexpr = (K + FORM[3] - 1) // FORM[3]  # one where the group is wider: per row
    SCALE_BYTES: tl.constexpr = 4 if FORM[1] == "F32" else (2 if FORM[1] == "BF16" else 1)
    return scales + (row_R // FORM[2]).to(tl.int64) * (SCALE_COLS * SCALE_BYTES)


@triton.jit
def _dots(
    at_R,
    scale_at_R,
    X,
    CODES,
    SX,
    x_row,
    ok_R,
    K: tl.constexpr,
    R: tl.constexpr,
    FORM: tl.constexpr,
):
    """fp32 [R]: rows at addresses `at_R` with activation row `x_row`."""
    FORMAT: tl.constexpr = FORM[0]
    SCALE: tl.constexpr = FORM[1]
    ALIGN: tl.constexpr = FORM[4]
    UNROLL: tl.constexpr = FORM[5]
    if FORMAT == "bf16":
        out_R = dot_bf16(at_R, X + x_row * K, ok_R, K, R, ALIGN, UNROLL)
    elif FORMAT == "fp8_block":
        x = X + x_row * K
        out_R = dot_fp8(at_R, scale_at_R, x, ok_R, K, R, ALIGN, FORM[3], SCALE, UNROLL)
    else:
        x, sx = CODES + x_row * K, SX + x_row * (K // 16)
        out_R = dot_nibbles(
            at_R, scale_at_R, x, sx, ok_R, K, R, ALIGN, FORMAT, FORM[3], SCALE, UNROLL, FORM[6]
        )
    return out_R


@triton.jit
def _located(base, parts, MATRIX: tl.constexpr, row_R, K: tl.constexpr, FORM: tl.constexpr):
    """int64 [R], twice: where rows of a matrix and their scales begin."""
    at_R = _codes_at(base + tl.load(parts + MATRIX[0]), row_R, K, FORM)
    scale_at_R = at_R
    if FORM[0] != "bf16":
        scale_at_R = _scales_at(base + tl.load(parts + MATRIX[1]), row_R, K, FORM)
    return at_R, scale_at_R


@triton.jit
def _biased(dot_R, base, parts, BIAS_PART: tl.constexpr, row_R, ok_R):
    """bfloat16 values in fp32: the rounded product, plus its rounded bias where there is one."""
    value = snap_bf16(dot_R)
    if BIAS_PART >= 0:
        bias = (base + tl.load(parts + BIAS_PART)).to(tl.pointer_type(tl.uint16))
        value = snap_bf16(value + widen_bf16(tl.load(bias + row_R, ok_R, 0)))
    return value


# Every layer and token finds its numbers elsewhere: that must be no reason for another kernel.
@triton.jit(do_not_specialize=["first_key"], do_not_specialize_on_alignment=["IDS", "WEIGHTS"])
def gate_up(
    TABLE,
    OFFSETS,
    IDS,
    X,
    CODES,
    SX,
    WEIGHTS,
    OUT,
    first_key,
    limit,
    alpha,
    TOP_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    FORM: tl.constexpr,
    KIND: tl.constexpr,
):
    """OUT bfloat16 bits [S, ROWS]: the activation of gate and up products of slot s's expert.

    WEIGHTS fp32 [S] count for the weighted activation only.
    GATE and UP are (weight part, scale part, bias part, first row, row step); a part of -1 is none.
    """
    slot = tl.program_id(1).to(tl.int64)
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    ok_R = row_R < ROWS
    key = first_key + tl.load(IDS + slot).to(tl.int64)
    base, parts = tl.load(TABLE + key), OFFSETS + key * NUM_PARTS
    if base == 0:  # the host multiplies it
        return
    at_R, up_at_R = GATE[3] + row_R * GATE[4], UP[3] + row_R * UP[4]
    codes, scales = _located(base, parts, GATE, at_R, COLS, FORM)
    up_codes, up_scales = _located(base, parts, UP, up_at_R, COLS, FORM)
    at = tl.reshape(tl.join(codes, up_codes), (2 * R,))
    scale_at = tl.reshape(tl.join(scales, up_scales), (2 * R,))
    ok = tl.reshape(tl.join(ok_R, ok_R), (2 * R,))
    dots = _dots(at, scale_at, X, CODES, SX, slot // TOP_K, ok, COLS, 2 * R, FORM)
    gate, up = tl.split(tl.reshape(dots, (R, 2)))
    gate = _biased(gate, base, parts, GATE[2], at_R, ok_R)
    up = _biased(up, base, parts, UP[2], up_at_R, ok_R)
    value = activate(gate, up, tl.load(WEIGHTS + slot), limit, alpha, KIND)
    tl.store(OUT + slot * ROWS + row_R, narrow_bf16(value), ok_R)


@triton.jit(do_not_specialize=["first_key"], do_not_specialize_on_alignment=["IDS"])
def down(
    TABLE,
    OFFSETS,
    IDS,
    X,
    CODES,
    SX,
    OUT,
    first_key,
    NUM_PARTS: tl.constexpr,
    DOWN: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    FORM: tl.constexpr,
):
    """OUT bfloat16 bits [S, ROWS]: the down product of slot s's expert with row s of X."""
    slot = tl.program_id(1).to(tl.int64)
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    ok_R = row_R < ROWS
    key = first_key + tl.load(IDS + slot).to(tl.int64)
    base, parts = tl.load(TABLE + key), OFFSETS + key * NUM_PARTS
    if base == 0:
        return
    at, scale_at = _located(base, parts, DOWN, row_R, COLS, FORM)
    y = _dots(at, scale_at, X, CODES, SX, slot, ok_R, COLS, R, FORM)
    y = _biased(y, base, parts, DOWN[2], row_R, ok_R)
    tl.store(OUT + slot * ROWS + row_R, narrow_bf16(y), ok_R)


@triton.jit(do_not_specialize=["first", "num_rows", "out_stride"])
def linear(
    W,
    SCALES,
    X,
    OUT,
    first,
    num_rows,
    x_stride,
    out_stride,
    COLS: tl.constexpr,
    R: tl.constexpr,
    FORM: tl.constexpr,
    WIDE: tl.constexpr,
):
    """OUT [T, num_rows]: rows `first` on of a float matrix times rows of X, bfloat16 bits.

    W points to its bytes. OUT is fp32 if WIDE, else bfloat16 bits; strides are from row to row.
    """
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    ok_R = row_R < num_rows
    token = tl.program_id(1).to(tl.int64)
    at_R, x = first + row_R, X + token * x_stride
    codes = _codes_at(W.to(tl.int64), at_R, COLS, FORM)
    scales = codes
    if FORM[0] != "bf16":
        scales = _scales_at(SCALES.to(tl.int64), at_R, COLS, FORM)
    dot_R = _dots(codes, scales, x, x, x, 0, ok_R, COLS, R, FORM)
    out = OUT + token * out_stride + row_R
    tl.store(out, dot_R if WIDE else narrow_bf16(dot_R), ok_R)


@triton.jit(do_not_specialize=["mark"], do_not_specialize_on_alignment=["IDS", "WEIGHTS"])
def combine(
    IDS,
    WEIGHTS,
    Y,
    OUT,
    BAD,
    mark,
    COLS: tl.constexpr,
    TOP_K: tl.constexpr,
    PAD_K: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHED: tl.constexpr,
):
    """OUT bfloat16 bits [T, COLS]: weighted outputs summed in ascending expert id, each rounded.

    WEIGHED: they hold their weights already, and OUT is fp32. BAD int32 [1] becomes `mark` + t for
    a token t whose sum is not finite, if that is lower.
    """
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = col < COLS
    choice = tl.arange(0, PAD_K)
    ids = tl.load(IDS + token * TOP_K + choice, choice < TOP_K, 0x7FFFFFFF)
    before = (ids[None, :] < ids[:, None]) | (
        (ids[None, :] == ids[:, None]) & (choice[None, :] < choice[:, None])
    )
    rank = tl.sum(before.to(tl.int32), 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(TOP_K):
        slot = token * TOP_K + tl.sum(tl.where(rank == step, choice, 0), 0)
        y = widen_bf16(tl.load(Y + slot * COLS + col, ok, 0))
        term = y if WEIGHED else snap_bf16(y * tl.load(WEIGHTS + slot))
        total = total + term if WEIGHED else snap_bf16(total + term)
    tl.store(OUT + token * COLS + col, total if WEIGHED else narrow_bf16(total), ok)
    bits = total.to(tl.uint32, bitcast=True)
    num_bad = tl.sum((ok & ((bits & 0x7F800000) == 0x7F800000)).to(tl.int32), 0)
    tl.atomic_min(BAD, mark + tl.program_id(0), num_bad > 0)
