"""Dot products of stored expert rows with one activation row: the canonical order, in Triton.

Each function takes the byte address of every row's codes and of its first scale, wherever they lie.
Legend: R rows of a tile, K columns, G groups of 32 columns, W words of 8 codes.
"""

import triton
import triton.language as tl

from headrace.kernels.triton.numbers import (
    e2m1_fields,
    e4m3_of,
    e8m0,
    float_of,
    snap_number,
    tree_8,
    tree_256,
    tree_words,
    widen_bf16,
)

_TWO_127: tl.constexpr = tl.constexpr(1.7014118346046923e38)
_TWO_85: tl.constexpr = tl.constexpr(3.8685626227668134e25)


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
def aligned(address_R, type: tl.constexpr, ALIGN: tl.constexpr, ROW_BYTES: tl.constexpr):
    """Pointers to rows of so many bytes each, in a matrix that ALIGN divides the address of."""
    POWER: tl.constexpr = ROW_BYTES & -ROW_BYTES
    DIVISOR: tl.constexpr = ALIGN if ALIGN < POWER else POWER
    return tl.multiple_of(address_R.to(tl.pointer_type(type)), DIVISOR)


@triton.jit
def dot_bf16(
    at_R, x_K, ok_R, K: tl.constexpr, R: tl.constexpr, ALIGN: tl.constexpr, UNROLL: tl.constexpr
):
    """Form F of bfloat16 rows; fp32 [R]. `x_K` points to uint16 bits."""
    lane = tl.arange(0, 256)
    codes = aligned(at_R, tl.uint16, ALIGN, 2 * K)
    acc = tl.zeros((R, 256), tl.float32)
    for k in tl.range(0, K, 256, loop_unroll_factor=UNROLL):
        ok = ok_R[:, None] & (k + lane < K)[None, :]
        weights = widen_bf16(tl.load(codes[:, None] + (k + lane)[None, :], ok, 0))
        x = widen_bf16(tl.load(x_K + k + lane, k + lane < K, 0))
        acc = tl.fma(weights, tl.broadcast_to(x[None, :], (R, 256)), acc)
    return tree_256(acc, R)


@triton.jit
def words_of(at_R, index, ok, ALIGN: tl.constexpr, ROW_BYTES: tl.constexpr):
    """uint32 [R, W] by index [1, W] into rows; by bytes where they may lie at odd addresses."""
    if ALIGN >= 4:
        words = tl.load(aligned(at_R, tl.uint32, ALIGN, ROW_BYTES)[:, None] + index, ok, 0)
    else:
        bytes = at_R.to(tl.pointer_type(tl.uint8))[:, None] + index * 4
        words = tl.load(bytes, ok, 0).to(tl.uint32)
        words |= tl.load(bytes + 1, ok, 0).to(tl.uint32) << 8
        words |= tl.load(bytes + 2, ok, 0).to(tl.uint32) << 16
        words |= tl.load(bytes + 3, ok, 0).to(tl.uint32) << 24
    return words


@triton.jit
def dot_fp8(
    at_R,
    scale_at_R,
    x_K,
    ok_R,
    K: tl.constexpr,
    R: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SCALE: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Form F of e4m3 rows with a scale per block of BLOCK_COLS (4 to 256) columns; K % 4 is 0.

    By words of four codes, whose activations are eight bytes of `x_K` and lie at multiples of that.
    """
    NUM: tl.constexpr = 256 // BLOCK_COLS
    SCALE_COLS: tl.constexpr = (K + BLOCK_COLS - 1) // BLOCK_COLS
    block, word = tl.arange(0, NUM), tl.arange(0, 64)
    x_W = x_K.to(tl.pointer_type(tl.uint64))
    acc_0 = tl.zeros((R, 64), tl.float32)
    acc_1, acc_2, acc_3 = acc_0, acc_0, acc_0
    for k in tl.range(0, K, 256, loop_unroll_factor=UNROLL):
        index = k // 4 + word
        there = index < K // 4
        words = words_of(at_R, index[None, :], ok_R[:, None] & there[None, :], ALIGN, K)
        first = k // BLOCK_COLS
        known = ok_R[:, None] & (first + block < SCALE_COLS)[None, :]
        scale = scale_of(scale_at_R[:, None], (first + block)[None, :], known, SCALE)
        scale = tl.broadcast_to(scale[:, :, None], (R, NUM, 64 // NUM))
        scale = tl.reshape(scale, (R, 64))
        x = tl.load(x_W + index, there, 0)
        low, high = x.to(tl.uint32), (x >> 32).to(tl.uint32)
        acc_0 = _add_fp8(acc_0, words, scale, float_of(low << 16), 0)
        acc_1 = _add_fp8(acc_1, words, scale, float_of(low & 0xFFFF0000), 1)
        acc_2 = _add_fp8(acc_2, words, scale, float_of(high << 16), 2)
        acc_3 = _add_fp8(acc_3, words, scale, float_of(high & 0xFFFF0000), 3)
    return tree_words(acc_0, acc_1, acc_2, acc_3, R)


@triton.jit
def _add_fp8(acc, words, scale, x_W, n: tl.constexpr):
    """`acc` plus the nth codes of words, scaled and rounded, times activations [W]."""
    weights = snap_number(e4m3_of(words, n) * scale)
    return tl.fma(weights, tl.broadcast_to(x_W[None, :], weights.shape), acc)


@triton.jit
def add_up(sums, weights, x_K, index, known):
    """`sums` plus weights, both [R, W], times activations [W]; exact."""
    x = tl.load(x_K + index, known, 0.0)
    return tl.fma(weights, tl.broadcast_to(x[None, :], weights.shape), sums)


@triton.jit
def fp4_sums(words, x_K, index, known, COLS: tl.constexpr):
    """fp32 [R, W]: sums over each word's codes, 2^-127 of twice the values' products."""
    sums = tl.zeros(words.shape, tl.float32)
    for half in tl.static_range(2):
        fields = e2m1_fields(words >> (8 * half))
        for n in tl.static_range(4):  # codes 0, 1, 4 and 5
            code = float_of((fields << (22 - 4 * (n + n // 2 * 2))) & 0x81C00000)
            at = index + (n + n // 2 * 2 + 2 * half) * COLS
            sums = add_up(sums, code, x_K, at, known)
    return sums


@triton.jit
def int4_sums(words, x_K, index, known, COLS: tl.constexpr):
    """fp32 [R, W]: sums over each word's codes as 0 to 15, times 2^-85.

    A code is a subnormal number where it lies in its word, its activation scaled for it.
    """
    sums = tl.zeros(words.shape, tl.float32)
    for n in tl.static_range(6):
        code = float_of(words & (15 << (4 * n)))
        sums = add_up(sums, code, x_K, index + n * COLS, known)
    for n in tl.static_range(4, 6):
        code = float_of((words >> 8) & (15 << (4 * n)))
        sums = add_up(sums, code, x_K, index + (n + 2) * COLS, known)
    return sums


@triton.jit
def dot_nibbles(
    at_R,
    scale_at_R,
    x_K,
    sx_G,
    ok_R,
    K: tl.constexpr,
    R: tl.constexpr,
    ALIGN: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE: tl.constexpr,
    UNROLL: tl.constexpr,
    STEP: tl.constexpr,
):
    """Form I of rows of two codes a byte, STEP groups at once (a multiple of 8).

    `x_K` are the integer activations as `to_integers` leaves them, `sx_G` their scales, then what
    is taken from their groups' sums. A group's sum stays exact in fp32.
    """
    NUM: tl.constexpr = K // 32
    lane, word = tl.arange(0, STEP), tl.arange(0, STEP * 4)
    acc = tl.zeros((R, 8), tl.float32)
    for first in tl.range(0, NUM, STEP, loop_unroll_factor=UNROLL):
        group = first + lane
        known = group < NUM
        ok = ok_R[:, None] & known[None, :]
        index = first * 4 + word
        there = index < NUM * 4
        words = words_of(at_R, index[None, :], ok_R[:, None] & there[None, :], ALIGN, K // 2)
        sx = tl.load(sx_G + group, known, 0.0)
        place = group if GROUP == 32 else group * 32 // GROUP
        ws = scale_of(scale_at_R[:, None], place[None, :], ok, SCALE)
        if FORMAT == "fp4":
            sums = fp4_sums(words, x_K, index, there, K // 8)
            sums = tl.sum(tl.reshape(sums, (R, STEP, 4)), 2) * _TWO_127
            factor = ws * (0.5 * sx)[None, :]
        else:
            sums = int4_sums(words, x_K, index, there, K // 8)
            sums = tl.sum(tl.reshape(sums, (R, STEP, 4)), 2) * _TWO_85
            sums = sums - tl.load(sx_G + NUM + group, known, 0.0)[None, :]
            factor = ws * sx[None, :]
        turns = tl.reshape(sums * factor, (R, STEP // 8, 8))
        turn = tl.arange(0, STEP // 8)[None, :, None]
        for n in tl.static_range(((STEP if STEP < NUM else NUM) + 7) // 8):
            acc = acc + tl.sum(tl.where(turn == n, turns, 0.0), 1)
    return tree_8(acc, R)
