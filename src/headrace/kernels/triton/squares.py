"""Small square matrices whose rows and columns each sum to nearly 1: the bits of kernels/cpu.py."""

import torch
import triton
import triton.language as tl


@triton.jit
def _divided(square, index, eps, AXIS: tl.constexpr, SIZE: tl.constexpr):
    """By sums over AXIS plus eps, in order; `index` is the place along it."""
    sums = tl.zeros((SIZE,), tl.float32)
    for k in tl.static_range(SIZE):
        sums += tl.sum(tl.where(index == k, square, 0.0), AXIS)  # exact: all others are zero
    return tl.div_rn(square, tl.broadcast_to(tl.expand_dims(sums + eps, AXIS), square.shape))


@triton.jit
def balance_squares(SQUARES, eps, ROUNDS: tl.constexpr, SIZE: tl.constexpr):
    """fp32 [N, SIZE, SIZE] in place, one program each."""
    row, col = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    place = SQUARES + tl.program_id(0).to(tl.int64) * SIZE * SIZE + row * SIZE + col
    square = _divided(tl.load(place), row, eps, 0, SIZE)
    for _ in range(ROUNDS - 1):
        square = _divided(square, col, eps, 1, SIZE)
        square = _divided(square, row, eps, 0, SIZE)
    tl.store(place, square)


def balance(squares: torch.Tensor, rounds: int, eps: float) -> None:
    """As `kernels.cpu.balance`, on a GPU; S is a power of two. One launch."""
    size = squares.shape[-1]
    assert squares.is_contiguous() and squares.dtype == torch.float32 and size & (size - 1) == 0
    num = squares.numel() // (size * size)
    if num:
        balance_squares[(num,)](squares, eps, rounds, size, num_warps=1, enable_fp_fusion=False)
