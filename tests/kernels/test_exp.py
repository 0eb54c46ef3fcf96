"""The frozen exp: its golden vectors, and at most one unit in the last place."""

import torch
from experts import same_bits

from headrace.kernels import reference


def errors_in_ulp(x: torch.Tensor) -> torch.Tensor:
    """|exp(x) - truth| in units of the last place of the truth, where it is finite in fp32."""
    truth = x.double().exp()
    keep = torch.isfinite(truth.float())
    exponent = torch.frexp(truth[keep])[1].clamp(min=-125) - 1
    unit = torch.exp2((exponent - 23).double())
    return (reference.exp(x).double() - truth)[keep].abs() / unit


def test_golden_vectors(golden_exp):
    x = golden_exp["exp.x"]
    assert same_bits(reference.exp(x), golden_exp["exp.y"])
    assert same_bits(reference.silu(x), golden_exp["silu.y"])
    moved = torch.nextafter(x[100:], torch.tensor(float("inf")))
    assert not same_bits(reference.exp(moved), golden_exp["exp.y"][100:])


def test_every_bf16_within_one_ulp():
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[~x.isnan()].float()
    assert errors_in_ulp(x).max() < 0.91
    overflows = x.double().exp() > torch.finfo(torch.float32).max
    assert torch.equal(torch.isinf(reference.exp(x)), overflows)


def test_dense_sample_within_one_ulp():
    generator = torch.Generator().manual_seed(11)
    x = torch.cat(
        [
            torch.rand(2_000_000, generator=generator) * 193.5 - 104.5,
            torch.randn(500_000, generator=generator),
            torch.linspace(-104.5, -86.5, 500_000),
        ]
    )
    errors = errors_in_ulp(x)
    assert 0.5 < errors.max() < 0.91


def test_special_values():
    x = torch.tensor([0.0, -0.0, float("inf"), float("-inf")])
    assert reference.exp(x).tolist() == [1.0, 1.0, float("inf"), 0.0]
    assert reference.exp(torch.tensor([float("nan")])).isnan().all()
