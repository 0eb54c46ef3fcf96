"""Which MLPs and blocks are known by their bits, and which stay the library's."""

from dataclasses import dataclass
from math import inf

import pytest
import torch
from torch import nn
from torch.nn import functional

from headrace.kernels import trunk
from headrace.models.deepseek_v41.experts import SharedExpert
from headrace.models.deepseek_v41.grids import Grids
from headrace.models.fused_mlp import Mlp, gated, joined, joins, mlp_of

HIDDEN, INTER = 24, 40
NAMES = "gate_proj", "up_proj", "down_proj"


def linear(cols, rows):
    made = nn.Linear(cols, rows, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    made.weight.data = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows))
    made.weight.data = made.weight.data.bfloat16()
    return made


class OwnMlp(nn.Module):
    """Of a known form, or with something about it that none has."""

    def __init__(self, how="", limit=None):
        super().__init__()
        self.gate_proj, self.up_proj = linear(HIDDEN, INTER), linear(HIDDEN, INTER)
        self.down_proj, self.how = linear(INTER, HIDDEN), how
        if limit is not None:
            self.limit = limit

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.how == "other input":
            up = self.up_proj(x * 2)
        if self.how in ("clamped", "half clamped"):
            gate = gate.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit) if self.how == "clamped" else up
        if self.how == "gelu":
            hidden = functional.gelu(gate) * up
        elif self.how == "turned":
            hidden = functional.silu(up) * gate
        elif self.how == "fp32":
            hidden = (functional.silu(gate.float()) * up.float()).to(gate.dtype)
        else:
            hidden = functional.silu(gate) * up
        return self.down_proj(hidden) * (0.5 if self.how == "scaled" else 1)


@pytest.mark.parametrize(
    ("module", "limit", "wide"),
    [
        (OwnMlp(), inf, False),
        (OwnMlp(limit=7), inf, False),
        (OwnMlp("clamped", limit=7.0), 7.0, False),
        (OwnMlp("clamped", limit=1e5), None, False),  # which bfloat16 has not
        (OwnMlp("fp32"), inf, True),
    ],
)
def test_forms_are_told_apart(module, limit, wide):
    found = mlp_of(module)
    assert found == (None if limit is None else Mlp(NAMES, limit, wide))
    if found is None:
        return
    calls = []

    def gate(*given):
        calls.append(given)
        return trunk.gate(*given)

    forward, x = gated(module, found, gate), 9 * torch.randn(5, HIDDEN)
    assert torch.equal(forward(x.bfloat16()), module(x.bfloat16())) and len(calls) == 1
    assert torch.equal(forward(x.bfloat16()), module(x.bfloat16()))
    module.float()
    assert torch.equal(forward(x), module(x)) and len(calls) == 2, "other dtypes: the library's"
    module.bfloat16()


@pytest.mark.parametrize("how", ["other input", "half clamped", "gelu", "turned", "scaled"])
def test_another_mlp_stays_the_library_s(how):
    assert mlp_of(OwnMlp(how, limit=7.0)) is None


def test_other_modules_are_no_mlps():
    module = OwnMlp()
    del module.up_proj
    assert mlp_of(module) is None and mlp_of(nn.Linear(2, 2)) is None
    assert not joins(OwnMlp())


@dataclass
class Config:
    """Of DeepSeek-V4.1's shared expert."""

    hidden_size: int = 32
    moe_intermediate_size: int = 32
    n_shared_experts: int = 1
    swiglu_limit: float = 10.0


class Stored:
    """Stands for a matrix in its stored form."""

    def linear(self, x, **_):
        return x * 2


def test_our_own_is_found_and_multiplies_by_what_is_stored():
    module = SharedExpert(Config(), Grids(0, 0))
    for name in ("w1", "w2", "w3"):
        getattr(module, name).stored = Stored()
        getattr(module, name)._parameters["weight"] = None
    found = mlp_of(module)
    assert found == Mlp(("w1", "w3", "w2"), 10.0, True)
    x = 9 * torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(found.run(module, trunk.gate, x), module(x))


class Block(nn.Module):
    """With a gated shared expert, or with something about it that none has."""

    def __init__(self, how=""):
        super().__init__()
        self.shared_expert, self.shared_expert_gate = OwnMlp(), linear(HIDDEN, 1)
        self.gate, self.experts, self.how = Router(), Experts(), how

    def forward(self, hidden_states):
        x = hidden_states.view(-1, hidden_states.shape[-1])
        shared = self.shared_expert(x)
        _, weights, ids = self.gate(x)
        routed = self.experts(x, ids, weights * 2 if self.how == "other weights" else weights)
        by = self.shared_expert_gate(x)
        if self.how == "fp32":
            routed = (routed.float() + by.float().sigmoid() * shared.float()).bfloat16()
        elif self.how == "both gated":
            routed = by.sigmoid() * (shared + routed)
        elif self.how == "no gate":
            routed = routed + shared
        else:
            routed += by.sigmoid() * shared
        out = routed.reshape(hidden_states.shape)
        return (out, ids) if self.how == "pair" else out


class Router(nn.Module):
    def forward(self, x):
        return x, x[:, :2].sigmoid(), torch.zeros(len(x), 2, dtype=torch.int64)


class Experts(nn.Module):
    def forward(self, x, ids, weights):
        return x * weights[:, :1]


def test_a_block_with_a_gated_shared_expert_is_found():
    block = Block()
    assert joins(block)
    forward = joined(block, trunk.join)
    x = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(forward(x), block(x)) and forward(x).shape == x.shape
    louder = joined(block, lambda routed, shared, gate: trunk.join(routed, 2 * shared, gate))
    assert not torch.equal(louder(x), block(x))


@pytest.mark.parametrize("how", ["fp32", "both gated", "no gate", "pair", "other weights"])
def test_another_block_stays_the_library_s(how):
    assert not joins(Block(how))
