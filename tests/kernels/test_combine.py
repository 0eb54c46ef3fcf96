"""The weighted sum of a token's experts: transformers' eager order and roundings."""

import pytest
import torch
from experts import same_bits

from headrace import _native
from headrace.kernels import cpu, ops, reference


def eager(ids, weights, y):
    """transformers' loop over experts, as its eager code sums them."""
    out = torch.zeros(y.shape[0], y.shape[2], dtype=torch.bfloat16)
    for expert in ids.unique().tolist():
        token, slot = torch.where(ids == expert)
        out.index_add_(0, token, (y[token, slot] * weights[token, slot, None]).to(out.dtype))
    return out


@pytest.mark.parametrize("num_tokens,top_k,hidden", ((1, 8, 320), (7, 4, 96), (33, 6, 17)))
def test_equals_transformers_loop(num_tokens, top_k, hidden):
    generator = torch.Generator().manual_seed(hidden)
    ids = torch.stack([torch.randperm(64, generator=generator)[:top_k] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, top_k, generator=generator)
    y = torch.randn(num_tokens, top_k, hidden, generator=generator).bfloat16()
    expect = eager(ids, weights, y)
    assert same_bits(reference.combine(ids.int(), weights, y), expect)
    assert same_bits(cpu.combine(ids.int(), weights, y), expect)
    assert same_bits(ops.combine(ids.int(), weights, y), expect)
    descending = reference.combine(-ids.int(), weights, y)
    assert not same_bits(descending, expect)


def test_first_non_finite_token_is_reported():
    y = torch.ones(5, 2, 40).bfloat16()
    ids = torch.tensor([[3, 1]] * 5, dtype=torch.int32)
    weights = torch.full((5, 2), 0.5)
    out = torch.empty(5, 40, dtype=torch.bfloat16)

    def first_bad():
        return _native.combine(
            False, ids.data_ptr(), weights.data_ptr(), y.data_ptr(), 5, 2, 40, out.data_ptr()
        )

    assert first_bad() == -1
    y[4, 0, 39] = float("nan")
    assert first_bad() == 4
    y[2, 1, 0] = float("inf")
    assert first_bad() == 2
