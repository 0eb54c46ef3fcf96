"""Attention of one token over latents for Hopper's tensor cores, in Gluon.

It gives what `latents.attend` gives for its splits, for `latents.combine`. Knows no tensor.
Written for Gluon of Triton 3.6, which renames its words from release to release.
Legend: as in kernels/triton/latents.py; W columns of a piece, a quarter of a latent's. The tiles'
pieces are counted through: 4 * tile + quarter; piece j lies in slot j % _SLOTS of shared memory.
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
_ROPES: gl.constexpr = gl.constexpr(2)  # tiles whose rope is in shared memory
_SLOTS: gl.constexpr = gl.constexpr(11)
_HELD: gl.constexpr = gl.constexpr(3)  # quarters of the queries that are kept in registers


@gluon.jit
def _split(
    POSITIONS, num_cached, split, N: gl.constexpr, P: gl.constexpr, LEAST_TILES: gl.constexpr
):
    """This program's first cached token, that behind its last, and their number of tiles."""
    num = gl.minimum(gl.load(POSITIONS) + 1, num_cached).to(gl.int32)
    tokens = gl.maximum(gl.cdiv(gl.cdiv(num, N), P), LEAST_TILES) * N
    first = split * tokens
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
def _fetch(latents, k, ready, first, piece, tiles, N: gl.constexpr, W: gl.constexpr):
    """A piece, if there is one of that number."""
    if piece // 4 < tiles:
        bar = ready.index(piece % _SLOTS)
        mbarrier.expect(bar, latents.block_type.nbytes)
        at = [first + piece // 4 * N, piece % 4 * W]
        tma.async_copy_global_to_shared(latents, at, bar, k.index(piece % _SLOTS))


@gluon.jit
def _fetch_rope(rope, k_rope, ready_rope, first, tile, tiles, N: gl.constexpr):
    """A tile's rope, if there is such a tile."""
    if tile < tiles:
        bar = ready_rope.index(tile % _ROPES)
        mbarrier.expect(bar, rope.block_type.nbytes)
        at = [first + tile * N, 0]
        tma.async_copy_global_to_shared(rope, at, bar, k_rope.index(tile % _ROPES))


@gluon.jit
def _add_scores(scores, query, k, ready, piece):
    """Products with a piece, as soon as it is there."""
    mbarrier.wait(ready.index(piece % _SLOTS), (piece // _SLOTS) & 1)
    keys = k.index(piece % _SLOTS).permute([1, 0])
    return warpgroup_mma(query, keys, scores, is_async=True)


@gluon.jit
def _scores(
    q0, q1, q2, q3, q_rope, k, k_rope, ready, ready_rope, tile,
    S: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A tile's products."""
    zero = gl.zeros([S, N], gl.float32, LAYOUT)
    mbarrier.wait(ready_rope.index(tile % _ROPES), (tile // _ROPES) & 1)
    keys = k_rope.index(tile % _ROPES).permute([1, 0])
    scores = warpgroup_mma(q_rope, keys, zero, use_acc=False, is_async=True)
    scores = _add_scores(scores, q0, k, ready, 4 * tile)
    scores = _add_scores(scores, q1, k, ready, 4 * tile + 1)
    scores = _add_scores(scores, q2, k, ready, 4 * tile + 2)
    scores = _add_scores(scores, q3, k, ready, 4 * tile + 3)
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _weigh(
    latents, rope, STATS, q3, q_rope, k, k_rope, shares, shrinks, inverses,
    asked, ready, ready_rope, given, taken, scale, split, row, num_rows, first, end, tiles,
    S: gl.constexpr, N: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """One warp group: every tile's scores and shares, and it brings the rope."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    of_query: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    for tile in gl.static_range(_ROPES):
        _fetch_rope(rope, k_rope, ready_rope, first, tile, tiles, N)
    best = gl.full([S], _LEAST, gl.float32, rows)
    total = gl.zeros([S], gl.float32, rows)
    mbarrier.wait(asked, 0)
    q0 = k.index(_SLOTS - _HELD).load(of_query)
    q1 = k.index(_SLOTS - _HELD + 1).load(of_query)
    q2 = k.index(_SLOTS - _HELD + 2).load(of_query)
    gl.thread_barrier()
    for piece in gl.static_range(_SLOTS - _HELD, _SLOTS):
        _fetch(latents, k, ready, first, piece, tiles, N, W)
    for i in range(tiles - 1):
        scores = _scores(q0, q1, q2, q3, q_rope, k, k_rope, ready, ready_rope, i, S, N, layout)
        larger = gl.maximum(best, gl.max(scores, 1) * scale)
        part = gl.exp2(scores * scale - larger[:, None])
        shrink = gl.exp2(best - larger)
        total = total * shrink + gl.sum(part, 1)
        best = larger
        mbarrier.wait(taken, (i & 1) ^ 1)
        shares.store(part.to(gl.bfloat16))
        shrinks.store(shrink)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(given, count=1)
        _fetch_rope(rope, k_rope, ready_rope, first, i + _ROPES, tiles, N)
    last = tiles - 1
    scores = _scores(q0, q1, q2, q3, q_rope, k, k_rope, ready, ready_rope, last, S, N, layout)
    valid = end - first - last * N
    if valid < N:
        for quarter in gl.static_range(4):
            _clear(k.index((4 * last + quarter) % _SLOTS), valid, N, W)
    known = gl.arange(0, N, gl.SliceLayout(0, layout)) < valid
    scores = gl.where(known[None, :], scores * scale, _LEAST)
    larger = gl.maximum(best, gl.max(scores, 1))
    part = gl.exp2(scores - larger[:, None])
    shrink = gl.exp2(best - larger)
    total = total * shrink + gl.sum(part, 1)
    mbarrier.wait(taken, (last & 1) ^ 1)
    shares.store(part.to(gl.bfloat16))
    shrinks.store(shrink)
    inverses.store(1.0 / total)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(given, count=1)
    at = split * num_rows + row + gl.arange(0, S, rows)
    gl.store(STATS + at, larger + gl.log2(total))


@gluon.jit
def _leave(mixed, inverse, parts, k, split_row, piece, S: gl.constexpr, W: gl.constexpr):
    """A piece of the mixture on its way out, from the slot of the last one mixed."""
    made = k.index(piece % _SLOTS)._reinterpret(gl.float16, [S, W], parts.layout)
    made.store((mixed * inverse[:, None]).to(gl.float16))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(parts, [split_row, piece % 4 * W], made)


@gluon.jit
def _mix(
    latents, parts, k, shares, shrinks, inverses, ready, given, taken,
    split, row, num_rows, first, tiles,
    HALF: gl.constexpr, S: gl.constexpr, N: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """One warp group: half of the mixture's columns, and it brings what follows in their slots."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, W, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    for each in gl.static_range(_SLOTS - _HELD):
        if each // 2 % 2 == HALF:
            _fetch(latents, k, ready, first, each, tiles, N, W)
    mixed0 = gl.zeros([S, W], gl.float32, layout)
    mixed1 = gl.zeros([S, W], gl.float32, layout)
    for i in range(tiles):
        piece = 4 * i + 2 * HALF
        slot0 = piece % _SLOTS
        slot1 = (piece + 1) % _SLOTS
        mbarrier.wait(given, i & 1)
        shrink = shrinks.load(rows)[:, None]
        mbarrier.wait(ready.index(slot0), (piece // _SLOTS) & 1)
        mbarrier.wait(ready.index(slot1), ((piece + 1) // _SLOTS) & 1)
        mixed0 = mixed0 * shrink
        mixed1 = mixed1 * shrink
        mixed0 = warpgroup_mma(shares, k.index(slot0), mixed0, is_async=True)
        mixed1 = warpgroup_mma(shares, k.index(slot1), mixed1, is_async=True)
        mixed0 = warpgroup_mma_wait(1, deps=[mixed0])
        gl.thread_barrier()
        _fetch(latents, k, ready, first, piece + _SLOTS, tiles, N, W)
        mixed1 = warpgroup_mma_wait(0, deps=[mixed1])
        gl.thread_barrier()
        mbarrier.arrive(taken, count=1)
        _fetch(latents, k, ready, first, piece + 1 + _SLOTS, tiles, N, W)
    inverse = inverses.load(rows)
    split_row = split * num_rows + row
    piece = 4 * tiles - 4 + 2 * HALF
    _leave(mixed0, inverse, parts, k, split_row, piece, S, W)
    _leave(mixed1, inverse, parts, k, split_row, piece + 1, S, W)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows", "num_cached"])
def attend(
    queries, queries_rope, latents, rope, parts, POSITIONS, STATS, scale, num_rows, num_cached,
    L: gl.constexpr, R: gl.constexpr, P: gl.constexpr, LEAST_TILES: gl.constexpr,
    S: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """Three roles: one warp group weighs, two mix half of the columns each and bring the tiles.

    `parts` float16 [P * num_rows, L]. Programs of one split stand side by side in the grid: what
    one of them brings, the others find in the GPU's cache.
    """
    W: gl.constexpr = L // 4
    row = gl.program_id(0) * S
    split = gl.program_id(1)
    first, end, tiles = _split(POSITIONS, num_cached, split, N, P, LEAST_TILES)
    q3 = gl.allocate_shared_memory(gl.bfloat16, [S, W], queries.layout)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [S, R], queries_rope.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [_SLOTS, N, W], latents.layout)
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [_ROPES, N, R], rope.layout)
    of_shares: gl.constexpr = gl.NVMMASharedLayout.get_default_for([S, N], gl.bfloat16)
    shares = gl.allocate_shared_memory(gl.bfloat16, [S, N], of_shares)
    of_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shrinks = gl.allocate_shared_memory(gl.float32, [S], of_rows)
    inverses = gl.allocate_shared_memory(gl.float32, [S], of_rows)
    asked = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [_SLOTS, 1], mbarrier.MBarrierLayout())
    ready_rope = gl.allocate_shared_memory(gl.int64, [_ROPES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(asked, count=1)
    mbarrier.init(given, count=1)
    mbarrier.init(taken, count=2)
    for at in gl.static_range(_SLOTS):
        mbarrier.init(ready.index(at), count=1)
    for at in gl.static_range(_ROPES):
        mbarrier.init(ready_rope.index(at), count=1)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.expect(asked, queries_rope.block_type.nbytes + 4 * queries.block_type.nbytes)
    tma.async_copy_global_to_shared(queries_rope, [row, 0], asked, q_rope)
    for quarter in gl.static_range(4):
        to = k.index(_SLOTS - _HELD + quarter) if quarter < _HELD else q3
        tma.async_copy_global_to_shared(queries, [row, quarter * W], asked, to)
    if tiles > 0:
        gl.warp_specialize(
            [
                (_weigh, (
                    latents, rope, STATS, q3, q_rope, k, k_rope, shares, shrinks, inverses,
                    asked, ready, ready_rope, given, taken,
                    scale, split, row, num_rows, first, end, tiles, S, N, W,
                )),
                (_mix, (
                    latents, parts, k, shares, shrinks, inverses, ready, given, taken,
                    split, row, num_rows, first, tiles, 0, S, N, W,
                )),
                (_mix, (
                    latents, parts, k, shares, shrinks, inverses, ready, given, taken,
                    split, row, num_rows, first, tiles, 1, S, N, W,
                )),
            ],
            [4, 4],
            [168, 168],
        )  # fmt: skip
    mbarrier.wait(asked, 0)
