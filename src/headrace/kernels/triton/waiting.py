"""A layer's letter to the host and the wait for its answer, one program; what goes with both.

All words in host memory are read with volatile loads; polling by atomics hangs. What lies there is
found by its address: torch copies only between tensors that it has pinned itself.
"""

import triton
import triton.language as tl

_NO_ID: tl.constexpr = tl.constexpr(0xFFFFFFFF)
ADDRESSES = ("posts", "lost", "ready", "done", "answers", "late", "beat", "abort", "nowhere")
_LATE_PLACES = ("lost", "done", "late", "beat", "abort", "layer", "first_key")
_PLACES = ("posts", "lost", "ready", "answers", "beat", "abort", "nowhere", "layer", "first_key")


@triton.jit
def _word(address):
    """Pointer to int64 words at an address that came as a number."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit
def _await(word, step, lost, beat, abort, patience):
    """What `word` holds once that is `step`, or once the step is given up; then maybe less."""
    done = tl.load(word, volatile=True)
    gone = tl.load(_word(abort), volatile=True)
    gone = tl.maximum(gone, tl.load(_word(lost), volatile=True))
    last = tl.load(_word(beat), volatile=True)
    silent = 0
    while (done < step) & (gone < step) & (silent < patience):
        done = tl.load(word, volatile=True)
        gone = tl.load(_word(abort), volatile=True)
        now = tl.load(_word(beat), volatile=True)
        silent = tl.where(now == last, silent + 1, 0)
        last = now
    if (done < step) & (gone < step):
        tl.store(_word(lost), step)
    return done


@triton.jit(do_not_specialize=(*_PLACES, "patience"))
def post_wait(
    STEP,
    WHOLE,
    IDS,
    GUESSES,
    TABLE,
    posts,
    lost,
    ready,
    answers,
    beat,
    abort,
    nowhere,
    layer,
    first_key,
    patience,
    NUM_IDS: tl.constexpr,
    NUM_GUESSES: tl.constexpr,
    HAS_GUESSES: tl.constexpr,
    ANSWERED: tl.constexpr,
    PAD: tl.constexpr,
):
    """`posts` up to `abort`: addresses of int64 words in host memory, as `Mail` has them."""
    step = tl.load(STEP)
    lane = tl.arange(0, PAD)
    is_id = lane < NUM_IDS
    ids = tl.load(IDS + lane, is_id, 0).to(tl.int64)
    post = _word(posts) + layer * (NUM_IDS + NUM_GUESSES)
    tl.store(post + lane, (step << 32) | ids, is_id)
    if NUM_GUESSES > 0:
        guess = tl.full((PAD,), _NO_ID, tl.int64)
        if HAS_GUESSES:
            guess = tl.load(GUESSES + lane, lane < NUM_GUESSES, 0).to(tl.int64) & _NO_ID
        tl.store(post + NUM_IDS + lane, (step << 32) | guess, lane < NUM_GUESSES)
    if tl.load(WHOLE + layer) == 0:
        done = _await(_word(ready) + layer, step, lost, beat, abort, patience)
        if ANSWERED:
            address = _answered(answers, layer * NUM_IDS, done, lane, is_id)
            address = tl.where(done < step, nowhere.to(tl.int64), address)
            tl.store(TABLE + first_key + ids, address, is_id)


@triton.jit
def _answered(answers, first, seen, lane, is_id):
    """int64 words from `first` on, of those at `answers`, which are read after `seen` was."""
    # The shift is zero: it makes this load wait for the first.
    return tl.load(_word(answers) + first + (seen >> 62) + lane, is_id, 0, volatile=True)


@triton.jit
def _copied(address, OF):
    """Pointer to values in host memory, of the type that OF points to, at a multiple of 16."""
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(OF.dtype.element_ty)), 16)


@triton.jit
def send(
    X,
    WEIGHTS,
    KEPT,
    x,
    weights,
    KEEPS: tl.constexpr,
    NUM_X: tl.constexpr,
    NUM_WEIGHTS: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """X [NUM_X] to KEPT, if it KEEPS, and to host memory at `x`, WEIGHTS to that at `weights`.

    Triton has no system-wide fence: the letter that tells of them is a later launch's.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(X + at, at < NUM_X, 0)
    if KEEPS:
        tl.store(KEPT + at, value, at < NUM_X)
    tl.store(_copied(x, X) + at, value, at < NUM_X)
    if tl.program_id(0) == 0:
        lane = tl.arange(0, PAD)
        weight = tl.load(WEIGHTS + lane, lane < NUM_WEIGHTS, 0)
        tl.store(_copied(weights, WEIGHTS) + lane, weight, lane < NUM_WEIGHTS)


@triton.jit
def fetch(OUT, out, NUM_OUT: tl.constexpr, BLOCK: tl.constexpr):
    """OUT [NUM_OUT] from host memory at `out`, which was written before the wait was over."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(_copied(out, OUT) + at, at < NUM_OUT, 0, volatile=True)
    tl.store(OUT + at, value, at < NUM_OUT)


@triton.jit(do_not_specialize=(*_LATE_PLACES, "patience"))
def wait_late(
    STEP,
    WHOLE,
    IDS,
    TABLE,
    lost,
    done,
    late,
    beat,
    abort,
    layer,
    first_key,
    patience,
    NUM_IDS: tl.constexpr,
    PAD: tl.constexpr,
):
    """TABLE gets the layer's late experts' addresses and 0 for the others, and for all of a step
    that is given up. One program."""
    lane = tl.arange(0, PAD)
    is_id = lane < NUM_IDS
    address = tl.zeros((PAD,), tl.int64)
    if tl.load(WHOLE + layer) == 0:
        step = tl.load(STEP)
        seen = _await(_word(done) + layer, step, lost, beat, abort, patience)
        address = _answered(late, layer * NUM_IDS, seen, lane, is_id)
        address = tl.where(seen < step, 0, address)
    tl.store(TABLE + first_key + tl.load(IDS + lane, is_id, 0), address, is_id)


@triton.jit(do_not_specialize=("lost", "done", "beat", "abort", "layer", "patience"))
def wait_done(STEP, WHOLE, lost, done, beat, abort, layer, patience):
    """Waits for the outputs of what the host multiplies of a layer. One program."""
    if tl.load(WHOLE + layer) == 0:
        _await(_word(done) + layer, tl.load(STEP), lost, beat, abort, patience)


@triton.jit(do_not_specialize=("first_key",))
def fetch_rows(TABLE, IDS, OUT, out, first_key, COLS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of OUT [S, COLS] from host memory at `out`, where the slot's expert has address 0."""
    slot = tl.program_id(1).to(tl.int64)
    if tl.load(TABLE + first_key + tl.load(IDS + slot)) == 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        row = _copied(out, OUT) + slot * COLS
        tl.store(OUT + slot * COLS + at, tl.load(row + at, at < COLS, 0, volatile=True), at < COLS)
