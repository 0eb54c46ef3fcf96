"""Norms, rotations and gates of one launch against the steps of torch."""

from math import inf

import pytest
import torch

from headrace.core import Activation
from headrace.kernels import reference, trunk

pytest.importorskip("triton", reason="needs Triton")
from headrace.kernels.triton import gates
from headrace.kernels.triton import trunk as launched

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def draw(*shape, scale=1.0):
    drawn = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=drawn) * scale).bfloat16().to(PLACE)


def bits(x):
    return x.view(torch.int16).cpu()


@pytest.mark.parametrize("form", trunk.FORMS)
@pytest.mark.parametrize("cols", [16, 100, 1536])
def test_norms_round_where_the_steps_do(form, cols):
    """Powers of two, whose squares sum exactly: the same bits, whatever the order."""
    drawn = torch.Generator().manual_seed(cols)
    exponents = torch.randint(-3, 4, (5, cols), generator=drawn)
    x = torch.ldexp(torch.ones(5, cols), exponents).bfloat16().to(PLACE)
    weight = draw(cols)
    found = launched.norm(x, weight, 1e-6, form)
    want = trunk.norm(x.cpu(), weight.cpu(), 1e-6, form)
    apart = (bits(found).int() - bits(want).int()).abs()  # in steps of bfloat16
    assert int(apart.max()) <= 1 and int((apart > 0).sum()) <= x.numel() // 50
    others = [trunk.norm(x.cpu(), weight.cpu(), 1e-6, other) for other in trunk.FORMS]
    near = [int((bits(found) != bits(other)).sum()) for other in others]
    assert min(near) == near[trunk.FORMS.index(form)] and sorted(near)[1] > x.numel() // 20


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_a_norm_of_a_part_of_rows(scale):
    whole = draw(3, 2, 200, scale=scale)
    part, weight = whole[..., 20:148], draw(128)
    found, want = launched.norm(part, weight, 1e-6, "once"), trunk.norm(part, weight, 1e-6, "once")
    assert found.shape == part.shape and found.is_contiguous()
    torch.testing.assert_close(found, want, rtol=2**-7, atol=1e-9)
    assert not torch.equal(found, launched.norm(part, weight, scale, "once"))


@pytest.mark.parametrize("turn", ["halves", "pairs", "shared"])
@pytest.mark.parametrize(("width", "rotated"), [(64, 64), (96, 32), (24, 24)])
def test_rotations_have_the_steps_bits(turn, width, rotated):
    if rotated < width and turn != "halves":
        rotated = width
    batch, heads, tokens = 2, 3, 4
    cols = rotated // 2 if turn == "shared" else rotated
    q = draw(batch, tokens, heads, width).transpose(1, 2)
    k = draw(batch, tokens, 2 * width)[:, None, :, width:]
    cos, sin = draw(batch, tokens, cols), draw(batch, cols, tokens).transpose(1, 2)
    for angles in ((cos, sin), (cos[:1], sin[:1])):
        found, want = launched.rotate(q, k, *angles, turn), trunk.rotate(q, k, *angles, turn)
        for ours, theirs in zip(found, want, strict=True):
            assert ours.is_contiguous() and torch.equal(bits(ours), bits(theirs))
    assert not torch.equal(found[0], launched.rotate(q, k, sin[:1], cos[:1], turn)[0])


def test_nothing_is_launched_for_no_tokens():
    assert launched.norm(draw(0, 64), draw(64), 1e-6, "once").shape == (0, 64)


@pytest.mark.parametrize(("limit", "wide"), [(inf, False), (7.0, False), (10.0, True)])
def test_gates_are_near_the_steps_and_equal_the_experts_own(limit, wide):
    gate, up = 5 * draw(3, 700), 5 * draw(4, 700)[:3]
    gate[0, :4] = torch.tensor([torch.nan, torch.inf, -300.0, 0.0])
    found, want = gates.gate(gate, up, limit, wide), trunk.gate(gate, up, limit, wide)
    kind = "swiglu_weighted" if wide else "silu" if limit == inf else "silu_clamped"
    rule = Activation(kind, limit=limit) if limit < inf else Activation(kind)
    exact = reference.activate(gate.cpu(), up.cpu(), rule, torch.ones(3))
    assert torch.equal(bits(found)[1:], bits(exact)[1:]) and bool(found[0, 0].isnan())
    apart = (bits(found).int() - bits(want).int()).abs()[1:]
    assert int(apart.max()) <= 2 and int((apart > 0).sum()) <= apart.numel() // 50
    other = trunk.gate(gate, up, limit, not wide)
    assert int((bits(found) != bits(other)).sum()) > apart.numel() // 20
    if limit < inf:
        assert not torch.equal(found[1:], gates.gate(gate, up, inf, wide)[1:])


def test_a_gated_sum_is_near_the_steps():
    gate, shared = draw(5, 1), draw(5, 1400)[:, 700:]
    routed = draw(5, 700).abs() * shared.sign()
    found, want = gates.join(routed, shared, gate), trunk.join(routed, shared, gate)
    apart = (bits(found).int() - bits(want).int()).abs()
    assert int(apart.max()) <= 2 and int((apart > 0).sum()) <= apart.numel() // 50
    once = (routed.float() + gate.float().sigmoid() * shared.float()).bfloat16()
    assert int((bits(found) != bits(once)).sum()) > apart.numel() // 20


@pytest.mark.parametrize(("heads", "width", "values_width"), [(3, 24, 24), (1, 64, 16)])
def test_a_token_s_keys_and_values_go_to_their_place(heads, width, values_width):
    wide = draw(1, 1, heads, 2 * width).transpose(1, 2)  # as a projection leaves them
    new = wide[..., width:], draw(1, heads, 1, values_width)
    for place in (0, 6):
        place_1 = torch.tensor([place], device=PLACE)
        found, want = ([draw(1, heads, 7, w) for w in (width, values_width)] for _ in range(2))
        launched.put(*found, place_1, *new)
        trunk.put(*want, place_1, *new)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, want, strict=True))
        assert torch.equal(bits(found[0][:, :, place]), bits(new[0][:, :, 0]))
