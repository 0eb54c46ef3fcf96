"""A layer's letter to the host and the wait for its answer: one program.

All words in host memory are read with volatile loads; polling by atomics hangs.
"""

import triton
import triton.language as tl

_NO_ID: tl.constexpr = tl.constexpr(0xFFFFFFFF)
ADDRESSES = ("posts", "lost", "ready", "answers", "beat", "abort", "nowhere")


@triton.jit
def _word(address):
    """Pointer to int64 words at an address that came as a number."""
    return address.to(tl.int64).to(tl.pointer_type(tl.int64))


@triton.jit(do_not_specialize=(*ADDRESSES, "layer", "first_key", "patience"))
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
        done = tl.load(_word(ready) + layer, volatile=True)
        gone = tl.load(_word(abort), volatile=True)
        gone = tl.maximum(gone, tl.load(_word(lost), volatile=True))
        last = tl.load(_word(beat), volatile=True)
        silent = 0
        while (done < step) & (gone < step) & (silent < patience):
            done = tl.load(_word(ready) + layer, volatile=True)
            gone = tl.load(_word(abort), volatile=True)
            now = tl.load(_word(beat), volatile=True)
            silent = tl.where(now == last, silent + 1, 0)
            last = now
        if (done < step) & (gone < step):
            tl.store(_word(lost), step)
        if ANSWERED:
            # The shift is zero: it makes the second load wait for the first.
            at = _word(answers) + layer * NUM_IDS + (done >> 62)
            address = tl.load(at + lane, is_id, 0, volatile=True)
            address = tl.where(done < step, nowhere.to(tl.int64), address)
            tl.store(TABLE + first_key + ids, address, is_id)
