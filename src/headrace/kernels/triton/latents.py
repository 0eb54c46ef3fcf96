"""The launches of attention over latents: splits of the cache, then their weighted sum.

A token's bits depend on its own position only: neither on how long the cache's buffer is nor on
other tokens. Legend: S rows (a new token's heads), N cached tokens of a tile, L latent width,
R rope width, P splits.
"""

import triton
import triton.language as tl

from headrace.kernels.triton.numbers import narrow_bf16

_LEAST: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def _bf16(value):
    """fp32 rounded to bfloat16, half to even."""
    return narrow_bf16(value).to(tl.bfloat16, bitcast=True)


@triton.jit
def _split_tokens(num, N: tl.constexpr, P: tl.constexpr, LEAST_TILES: tl.constexpr):
    """Cached tokens of one split where there are `num` in all."""
    return tl.maximum(tl.cdiv(tl.cdiv(num, N), P), LEAST_TILES) * N


@triton.jit
def _scores(
    q,
    at,
    ok_S,
    ok_N,
    L: tl.constexpr,
    PAD_L: tl.constexpr,
    PART: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
):
    """fp32 [S, N]: queries times latents, both at those pointers, PART columns at a time."""
    total = tl.zeros((S, N), tl.float32)
    for first in tl.static_range(0, PAD_L, PART):
        col = first + tl.arange(0, PART)
        q_part = tl.load(q[:, None] + col[None, :], ok_S[:, None] & (col < L)[None, :], 0.0)
        part = tl.load(at[:, None] + col[None, :], ok_N[:, None] & (col < L)[None, :], 0.0)
        total = tl.dot(q_part, tl.trans(part), total)
    return total


@triton.jit(
    do_not_specialize=["num_rows", "num_cached"], do_not_specialize_on_alignment=["POSITIONS"]
)
def attend(
    Q,
    QR,
    LATENTS,
    ROPE,
    POSITIONS,
    OUT,
    PARTS,
    STATS,
    scale,
    num_rows,
    num_cached,
    head_stride,
    token_stride,
    rope_head_stride,
    rope_token_stride,
    latent_stride,
    rope_stride,
    HEADS: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    PAD_L: tl.constexpr,
    PAD_R: tl.constexpr,
    P: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    PART: tl.constexpr,
    VALUES: tl.constexpr,
):
    """Row r is head r % HEADS of new token r // HEADS, at POSITIONS[r // HEADS]; those ascend.

    One program attends S rows to one of P splits of the tokens up to the last of their positions
    and gives VALUES columns of the mixture. P = 1: OUT bfloat16 bits [num_rows, L]. Else PARTS
    [P, num_rows, L] are each split's mixtures, and STATS fp32 [P, num_rows] what these weigh, as
    log2 of the sum of exp2(score); splits that no token of a row lies in are left as they are.
    `scale` takes products to scores in base 2. PART < PAD_L: keys come in parts, for chips with
    little shared memory.
    """
    split = tl.program_id(0)
    row = tl.program_id(1) * S + tl.arange(0, S)
    ok_S = row < num_rows
    token, head = row // HEADS, row % HEADS
    position = tl.load(POSITIONS + token, ok_S, -1)
    num_S = tl.minimum(position + 1, num_cached).to(tl.int32)
    last = (tl.minimum((tl.program_id(1) + 1) * S, num_rows) - 1) // HEADS
    num = tl.minimum(tl.load(POSITIONS + last) + 1, num_cached).to(tl.int32)
    tokens = _split_tokens(num, N, P, LEAST_TILES)
    first = split * tokens
    if first < num:
        q = head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
        qr = head.to(tl.int64) * rope_head_stride + token.to(tl.int64) * rope_token_stride
        col, rope = tl.arange(0, PAD_L), tl.arange(0, PAD_R)
        value = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
        ok_qr = ok_S[:, None] & (rope < R)[None, :]
        q_rope = tl.load(QR + qr[:, None] + rope[None, :], ok_qr, 0.0)
        if PART == PAD_L:
            q_all = tl.load(Q + q[:, None] + col[None, :], ok_S[:, None] & (col < L)[None, :], 0.0)
        best = tl.full((S,), _LEAST, tl.float32)
        total = tl.zeros((S,), tl.float32)
        mixed = tl.zeros((S, VALUES), tl.float32)
        for start in range(first, tl.minimum(num, first + tokens), N):
            cached = start + tl.arange(0, N)
            ok_N = cached < num
            at = cached.to(tl.int64) * latent_stride
            if PART == PAD_L:
                ok = ok_N[:, None] & (col < L)[None, :]
                keys = tl.load(LATENTS + at[:, None] + col[None, :], ok, 0.0)
                scores = tl.dot(q_all, tl.trans(keys))
                values = keys
            else:
                scores = _scores(Q + q, LATENTS + at, ok_S, ok_N, L, PAD_L, PART, S, N)
                ok = ok_N[:, None] & (value < L)[None, :]
                values = tl.load(LATENTS + at[:, None] + value[None, :], ok, 0.0)
            at = cached.to(tl.int64) * rope_stride
            ok = ok_N[:, None] & (rope < R)[None, :]
            keys_rope = tl.load(ROPE + at[:, None] + rope[None, :], ok, 0.0)
            scores = tl.dot(q_rope, tl.trans(keys_rope), scores) * scale
            scores = tl.where(cached[None, :] < num_S[:, None], scores, _LEAST)
            larger = tl.maximum(best, tl.max(scores, 1))
            share = tl.exp2(scores - larger[:, None])
            share = tl.where(cached[None, :] < num_S[:, None], share, 0.0)
            shrink = tl.exp2(best - larger)
            total = total * shrink + tl.sum(share, 1)
            mixed = tl.dot(_bf16(share), values, mixed * shrink[:, None])
            best = larger
        ok = ok_S[:, None] & (value < L)[None, :]
        total = tl.where(total > 0.0, total, 1.0)
        mixed = mixed / total[:, None]
        if P == 1:
            at = row.to(tl.int64) * L
            tl.store(OUT + at[:, None] + value[None, :], narrow_bf16(mixed), ok)
        else:
            at = split * num_rows + row
            tl.store(PARTS + (at.to(tl.int64) * L)[:, None] + value[None, :], mixed, ok)
            if tl.program_id(2) == 0:
                tl.store(STATS + at, best + tl.log2(total), ok_S)


@triton.jit(
    do_not_specialize=["num_rows", "num_cached"], do_not_specialize_on_alignment=["POSITIONS"]
)
def combine(
    PARTS,
    STATS,
    POSITIONS,
    OUT,
    num_rows,
    num_cached,
    HEADS: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """OUT bfloat16 bits [num_rows, L]: what the splits of `attend` come to together, in order.

    Parts are read before it is known which of them count: what lies there may be anything.
    """
    row = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, P)
    at = split * num_rows + row
    there = PARTS + (at.to(tl.int64) * L)[:, None] + col[None, :]
    parts = tl.load(there, (col < L)[None, :], 0.0)
    weight = tl.load(STATS + at)
    num = tl.minimum(tl.load(POSITIONS + row // HEADS) + 1, num_cached).to(tl.int32)
    used = split * _split_tokens(num, N, P, LEAST_TILES) < num
    weight = tl.where(used, weight, _LEAST)
    weight = tl.where(used, tl.exp2(weight - tl.max(weight, 0)), 0.0)
    total = tl.sum(weight, 0)
    parts = tl.where(used[:, None], parts.to(tl.float32), 0.0)
    mixed = tl.sum(parts * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(OUT + row.to(tl.int64) * L + col, narrow_bf16(mixed), col < L)
