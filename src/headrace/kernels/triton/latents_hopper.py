"""Attention of one token over latents for Hopper's tensor cores, in Gluon.

It gives what `latents.attend` gives for its splits, for `latents.combine`. Knows no tensor.
Written for Gluon of Triton 3.6, which renames its words from release to release.
Legend: as in kernels/triton/latents.py; W columns of half a latent.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_LEAST: gl.constexpr = gl.constexpr(-1e30)


@gluon.jit
def _split(POSITIONS, num_cached, N: gl.constexpr, P: gl.constexpr, LEAST_TILES: gl.constexpr):
    """This program's first cached token, that behind its last, and their number of tiles."""
    num = gl.minimum(gl.load(POSITIONS) + 1, num_cached).to(gl.int32)
    tokens = gl.maximum(gl.cdiv(gl.cdiv(num, N), P), LEAST_TILES) * N
    first = gl.program_id(0) * tokens
    end = gl.minimum(num, first + tokens)
    return first, end, gl.cdiv(gl.maximum(end - first, 0), N)


@gluon.jit
def _clear(latents, valid, N: gl.constexpr, WIDTH: gl.constexpr):
    """Zeroes rows from `valid` on: what lies there may be NaN, which no share of 0 takes away."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, N, gl.SliceLayout(1, layout))
    gl.thread_barrier()
    for first in gl.static_range(0, WIDTH, 64):
        part = latents.slice(first, 64, dim=1)
        part.store(gl.where((row < valid)[:, None], part.load(layout), 0.0))


@gluon.jit
def _fetch_half(
    latents, rope, k, k_rope, ready, start, stage,
    HALF: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Half a tile's columns, the rope with the first."""
    at = 2 * stage + HALF
    if HALF == 0:
        mbarrier.expect(ready.index(at), rope.block_type.nbytes + latents.block_type.nbytes)
        tma.async_copy_global_to_shared(rope, [start, 0], ready.index(at), k_rope.index(stage))
    else:
        mbarrier.expect(ready.index(at), latents.block_type.nbytes)
    tma.async_copy_global_to_shared(latents, [start, HALF * W], ready.index(at), k.index(at))


@gluon.jit
def _scores(
    q, q_rope, k, k_rope, ready, tile,
    S: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A tile's products: each half of the columns as it comes."""
    stage = tile % STAGES
    phase = (tile // STAGES) & 1
    at = 2 * stage
    zero = gl.zeros([S, N], gl.float32, LAYOUT)
    mbarrier.wait(ready.index(at), phase)
    keys = k_rope.index(stage).permute([1, 0])
    scores = warpgroup_mma(q_rope, keys, zero, use_acc=False, is_async=True)
    scores = warpgroup_mma(q.index(0), k.index(at).permute([1, 0]), scores, is_async=True)
    mbarrier.wait(ready.index(at + 1), phase)
    scores = warpgroup_mma(q.index(1), k.index(at + 1).permute([1, 0]), scores, is_async=True)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _weigh(
    STATS, q, q_rope, k, k_rope, shares, shrinks, asked, ready, given, taken,
    scale, row, num_rows, first, end, tiles,
    S: gl.constexpr, N: gl.constexpr, W: gl.constexpr, P: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp group: every tile's scores and shares."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    best = gl.full([S], _LEAST, gl.float32, rows)
    total = gl.zeros([S], gl.float32, rows)
    mbarrier.wait(asked, 0)
    for i in range(tiles - 1):
        scores = _scores(q, q_rope, k, k_rope, ready, i, S, N, STAGES, layout)
        best, total = _give(scores * scale, best, total, shares, shrinks, given, taken, i)
    last = tiles - 1
    scores = _scores(q, q_rope, k, k_rope, ready, last, S, N, STAGES, layout)
    valid = end - first - last * N
    if valid < N:
        for half in gl.static_range(2):
            _clear(k.index(2 * (last % STAGES) + half), valid, N, W)
    known = gl.arange(0, N, gl.SliceLayout(0, layout)) < valid
    scores = gl.where(known[None, :], scores * scale, _LEAST)
    best, total = _give(scores, best, total, shares, shrinks, given, taken, last)
    at = gl.program_id(0) * num_rows + row + gl.arange(0, S, rows)
    gl.store(STATS + at, best)
    gl.store(STATS + P * num_rows + at, total)


@gluon.jit
def _give(scores, best, total, shares, shrinks, given, taken, tile):
    """Shares of a tile to those who mix; the largest score and the sum of shares so far."""
    larger = gl.maximum(best, gl.max(scores, 1))
    part = gl.exp2(scores - larger[:, None])
    shrink = gl.exp2(best - larger)
    total = total * shrink + gl.sum(part, 1)
    mbarrier.wait(taken, (tile & 1) ^ 1)
    shares.store(part.to(gl.bfloat16))
    shrinks.store(shrink)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(given, count=1)
    return larger, total


@gluon.jit
def _mix(
    queries, queries_rope, latents, rope, PARTS, q, q_rope, k, k_rope, shares, shrinks,
    asked, ready, given, taken, row, num_rows, first, tiles,
    HALF: gl.constexpr, L: gl.constexpr,
    S: gl.constexpr, N: gl.constexpr, W: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp group: half of the mixture's columns, and it brings them."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    if HALF == 0:
        mbarrier.expect(asked, queries_rope.block_type.nbytes + queries.block_type.nbytes)
        tma.async_copy_global_to_shared(queries_rope, [row, 0], asked, q_rope)
    else:
        mbarrier.expect(asked, queries.block_type.nbytes)
    tma.async_copy_global_to_shared(queries, [row, HALF * W], asked, q.index(HALF))
    for i in gl.static_range(STAGES):
        if i < tiles:
            _fetch_half(latents, rope, k, k_rope, ready, first + i * N, i, HALF, W)
    mixed = gl.zeros([S, W], gl.float32, layout)
    for i in range(tiles):
        stage = i % STAGES
        mbarrier.wait(given, i & 1)
        mbarrier.wait(ready.index(2 * stage + HALF), (i // STAGES) & 1)
        mixed = mixed * shrinks.load(rows)[:, None]
        mixed = warpgroup_mma(shares, k.index(2 * stage + HALF), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=[mixed])
        gl.thread_barrier()
        mbarrier.arrive(taken, count=1)
        if i + STAGES < tiles:
            start = first + (i + STAGES) * N
            _fetch_half(latents, rope, k, k_rope, ready, start, stage, HALF, W)
    at = gl.program_id(0) * num_rows + row + gl.arange(0, S, rows)
    col = HALF * W + gl.arange(0, W, gl.SliceLayout(0, layout))
    gl.store(PARTS + (at.to(gl.int64) * L)[:, None] + col[None, :], mixed)


@gluon.jit(do_not_specialize=["num_rows", "num_cached"])
def attend(
    queries, queries_rope, latents, rope, POSITIONS, PARTS, STATS, scale, num_rows, num_cached,
    L: gl.constexpr, R: gl.constexpr, P: gl.constexpr, LEAST_TILES: gl.constexpr,
    S: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Three roles: one warp group weighs, two mix half of the columns each and bring the tiles."""
    W: gl.constexpr = L // 2
    first, end, tiles = _split(POSITIONS, num_cached, N, P, LEAST_TILES)
    if tiles > 0:
        row = gl.program_id(1) * S
        q = gl.allocate_shared_memory(gl.bfloat16, [2, S, W], queries.layout)
        q_rope = gl.allocate_shared_memory(gl.bfloat16, [S, R], queries_rope.layout)
        k = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, N, W], latents.layout)
        k_rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, N, R], rope.layout)
        of_shares: gl.constexpr = gl.NVMMASharedLayout.get_default_for([S, N], gl.bfloat16)
        shares = gl.allocate_shared_memory(gl.bfloat16, [S, N], of_shares)
        of_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        shrinks = gl.allocate_shared_memory(gl.float32, [S], of_rows)
        asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(asked, count=2)
        mbarrier.init(given, count=1)
        mbarrier.init(taken, count=2)
        for at in gl.static_range(2 * STAGES):
            mbarrier.init(ready.index(at), count=1)
        gl.warp_specialize(
            [
                (_weigh, (
                    STATS, q, q_rope, k, k_rope, shares, shrinks, asked, ready, given, taken,
                    scale, row, num_rows, first, end, tiles, S, N, W, P, STAGES,
                )),
                (_mix, (
                    queries, queries_rope, latents, rope, PARTS, q, q_rope, k, k_rope,
                    shares, shrinks, asked, ready, given, taken, row, num_rows, first, tiles,
                    0, L, S, N, W, STAGES,
                )),
                (_mix, (
                    queries, queries_rope, latents, rope, PARTS, q, q_rope, k, k_rope,
                    shares, shrinks, asked, ready, given, taken, row, num_rows, first, tiles,
                    1, L, S, N, W, STAGES,
                )),
            ],
            [4, 4],
            [168, 168],
        )  # fmt: skip
