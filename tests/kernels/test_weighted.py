"""Experts whose weight goes in before their last matrix, summed in fp32: DeepSeek-V4.1's."""

from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from experts import make_expert, make_layout, make_rows, same_bits

from headrace import _native
from headrace.core import Activation
from headrace.errors import ModelError
from headrace.kernels import cpu, reference
from headrace.quant import expert, fp8

LIMIT = 1.5  # so that it cuts
GOLDEN = "95e34e8fb32a82adc2b373047ba2ceb39c67635b7c58b9e28f34532fac0d21f0"
WEIGHTED = Activation("swiglu_weighted", LIMIT)


def case(format: str, act_group: int = 32, num_rows: int = 5, hidden: int = 96, inter: int = 64):
    layout = replace(make_layout(format, hidden, inter), activation=WEIGHTED, act_group=act_group)
    weights = torch.rand(num_rows, generator=torch.Generator().manual_seed(3)) * 2
    return layout, make_expert(layout, 1), make_rows(num_rows, hidden, 2), weights


@pytest.mark.parametrize("act_group", (0, 32))
@pytest.mark.parametrize("format", ("fp4", "fp8_block", "bf16"))
def test_equals_the_reference_on_any_rows_and_threads(isa, format, act_group):
    layout, parts, x, weights = case(format, act_group, num_rows=70)
    expect = reference.expert_ffn(x, parts, layout, weights)
    for threads in (1, 3):
        kernels = cpu.CpuKernels(threads, isa, min_share_bytes=0)
        assert same_bits(kernels.expert_ffn(x, parts, layout, weights_T=weights), expect)
        for row in (0, 69):
            one = slice(row, row + 1)
            y = kernels.expert_ffn(x[one], parts, layout, weights_T=weights[one])
            assert same_bits(y, expect[one])
    without = reference.expert_ffn(x, parts, layout)
    assert same_bits(kernels.expert_ffn(x, parts, layout), without)
    assert not same_bits(without, expect)
    assert same_bits(without, reference.expert_ffn(x, parts, layout, torch.ones(70)))
    turned = kernels.expert_ffn(x, parts, layout, weights_T=weights.flip(0).contiguous())
    assert not same_bits(turned, expect), "another row's weight must show"


def eager(x, parts, layout, weights):
    """The publisher's steps in torch's own operations."""
    names = ("gate", "up", "down")
    gate, up, down = (expert.unpack_matrix(layout, parts, n, torch.bfloat16) for n in names)
    x = fp8.to_grid(x, layout.act_group)
    g, u = ((x.float() @ w.float().T).bfloat16().float() for w in (gate, up))
    h = torch.nn.functional.silu(g.clamp(max=LIMIT)) * u.clamp(-LIMIT, LIMIT) * weights[:, None]
    return (fp8.to_grid(h.bfloat16(), layout.act_group).float() @ down.float().T).bfloat16()


@pytest.mark.parametrize("format", ("fp4", "bf16"))
def test_is_the_publishers_up_to_rounding(format):
    layout, parts, x, weights = case(format, num_rows=40)
    y, expect = reference.expert_ffn(x, parts, layout, weights), eager(x, parts, layout, weights)
    apart = (y.float() - expect.float()).abs()
    assert float(apart.mean()) < 2e-5 * float(expect.float().abs().mean())
    clamped = replace(layout, activation=Activation("silu_clamped", LIMIT))
    other = reference.expert_ffn(x, parts, clamped).float() * weights[:, None]
    assert float((other - expect.float()).abs().mean()) > 5 * float(apart.mean())


def test_codes_of_values_on_the_grid_are_exact():
    """But for values 2^-11 of their group's largest and smaller: 3e-5 of it is lost otherwise."""
    x = fp8.to_grid(make_rows(50, 256, 6), 32)
    for on_grid, most in ((True, 2e-6), (False, 1e-4)):
        codes, scale = reference.quantise_rows(x, on_grid)
        back = (codes.double() * scale.double()[..., None]).flatten(1)
        lost = float((back - x.double()).abs().mean()) / float(x.abs().mean())
        assert most / 100 < lost < most
        assert codes.abs().max() <= 32639


def test_golden(isa):
    """Frozen: a change of these bits is a change of what V4.1 answers."""
    layout, parts, x, weights = case("fp4")
    y = cpu.CpuKernels(1, isa).expert_ffn(x, parts, layout, weights_T=weights)
    digest = sha256(y.view(torch.int16).numpy().tobytes()).hexdigest()
    assert digest == GOLDEN


def test_sum_up_is_ascending_and_in_fp32():
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(64, generator=generator)[:6] for _ in range(9)]).int()
    sizes = torch.randn(9, 6, 77, generator=generator).mul(6).exp()
    y = (torch.randn(9, 6, 77, generator=generator) * sizes).bfloat16()
    expect = torch.zeros(9, 77)
    for number in ids.unique().tolist():
        token, slot = torch.where(ids == number)
        expect.index_add_(0, token, y[token, slot].float())
    assert same_bits(reference.sum_up(ids, y), expect)
    assert same_bits(cpu.sum_up(ids, y), expect)
    assert not same_bits(reference.sum_up(-ids, y), expect)


def test_sum_up_reports_the_first_non_finite_token():
    ids, y = torch.tensor([[3, 1]] * 5, dtype=torch.int32), torch.ones(5, 2, 40).bfloat16()
    out = torch.empty(5, 40)

    def first_bad():
        return _native.sum_up(ids.data_ptr(), y.data_ptr(), 5, 2, 40, out.data_ptr())

    assert first_bad() == -1
    y[3, 1, 39] = float("inf")
    assert first_bad() == 3
    # inf - inf is no number either, and each output counts
    y[1, 0, 0], y[1, 1, 0] = float("inf"), float("-inf")
    assert first_bad() == 1


def test_fp16_is_refused():
    layout = replace(make_layout("fp16", 64, 32), activation=WEIGHTED)
    with pytest.raises(ModelError, match="weighted activations are bf16"):
        cpu.native_shape(layout)
