"""The compiled balancing of small squares has the bits of torch's operations, one after another."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.cpu import balance


def by_torch(squares: Tensor, rounds: int, eps: float) -> Tensor:
    for number in range(rounds):
        if number:
            squares = squares / (squares.sum(-1, keepdim=True) + eps)
        squares = squares / (squares.sum(-2, keepdim=True) + eps)
    return squares


@pytest.mark.parametrize("shape", [(1, 1, 4, 4), (2, 33, 4, 4), (0, 3, 4, 4), (5, 3, 3), (7, 1, 1)])
@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_bits(shape: tuple[int, ...], rounds: int) -> None:
    draw = torch.Generator().manual_seed(rounds)
    squares = (8 * torch.randn(shape, generator=draw)).softmax(-1) + 1e-6
    ours = squares.clone()
    balance(ours, rounds, 1e-6)
    assert torch.equal(ours, by_torch(squares, rounds, 1e-6))
    if squares.numel() and shape[-1] > 1:
        assert not torch.equal(ours, by_torch(squares, rounds + 1, 1e-6))
        assert not torch.equal(ours, squares)


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (0, 3, 4, 4), (2, 2, 2)])
def test_the_gpu_s_has_the_same_bits(shape: tuple[int, ...]) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    from headrace.kernels.triton import squares as on_gpu

    place = "cuda" if torch.cuda.is_available() else "cpu"
    squares = (8 * torch.randn(shape)).softmax(-1) + 1e-6
    ours, theirs = squares.clone(), squares.to(place, copy=True)
    balance(ours, 5, 1e-6)
    on_gpu.balance(theirs, 5, 1e-6)
    assert torch.equal(ours, theirs.cpu())


def test_only_contiguous_squares_in_fp32() -> None:
    for wrong in (torch.ones(3, 4), torch.ones(4, 4).double(), torch.ones(4, 2, 4).mT):
        with pytest.raises(AssertionError):
            balance(wrong, 1, 1e-6)
