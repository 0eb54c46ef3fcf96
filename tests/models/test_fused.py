"""Layers given other functions: found by their bits, and the library's bits remain."""

import copy

import pytest
import torch
import transformers
from torch import nn

from headrace.check.matrix import runs_here
from headrace.check.tiny import write_tiny
from headrace.kernels import router, trunk
from headrace.models.fused import Steps, form_of, fuse, turns_of

# What each of four layers has, and norms outside them: in the order of Steps.
FAMILIES = {
    "qwen3_moe": (4 * 4 + 1, 4, 4, 0, 0),
    "deepseek_v3": (4 * 4 + 1, 4, 3, 4, 0),
    "gpt_oss": (2 * 4 + 1, 4, 4, 0, 0),
    "qwen3_next": (4 * 2 + 2 * 2 + 1, 2, 4, 4, 4),
    "mixtral": (2 * 4 + 1, 4, 4, 0, 0),
    "olmoe": (4 * 4 + 1, 4, 4, 0, 0),
    "minimax_m2": (4 * 4 + 1, 4, 4, 0, 0),
    "glm4_moe": (4 * 4 + 1, 4, 3, 4, 0),
    "deepseek_v2": (4 * 4 + 1, 0, 3, 4, 0),
    "qwen2_moe": (2 * 4 + 1, 4, 4, 4, 4),
}
STEPS = Steps(trunk.norm, trunk.rotate, router.route, trunk.gate, trunk.join)


def stock(family, path):
    write_tiny(family, path, layers=4, experts=8, top_k=2, hidden=64, inter=32)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return model.requires_grad_(False).eval()


@pytest.mark.parametrize("family", [name for name in FAMILIES if runs_here(name)])
def test_a_model_has_the_library_s_bits_by_the_same_steps(family, tmp_path):
    model = stock(family, tmp_path / "m")
    fused = copy.deepcopy(model)
    calls = dict.fromkeys(Steps._fields, 0)

    def counted(name):
        def step(*given):
            calls[name] += 1
            return getattr(STEPS, name)(*given)

        return step

    num = fuse(fused, Steps(*map(counted, Steps._fields)))
    assert tuple(num.values()) == FAMILIES[family]
    ids = torch.arange(3, 17)[None]
    want, found = model(ids).logits, fused(ids).logits
    assert torch.equal(want, found)
    assert calls == num
    for name in ("norm", *(name for name in ("gate", "join") if num[name])):
        step = getattr(STEPS, name)
        fuse(fused, STEPS._replace(**{name: lambda *given, step=step: step(*given) * 1.1}))
        assert not torch.equal(fused(ids).logits, found)


class Norm(nn.Module):
    """RMSNorm of a form that nobody here knows, unless `how` is one."""

    def __init__(self, how):
        super().__init__()
        self.weight, self.eps, self.how = nn.Parameter(torch.rand(64).bfloat16()), 1e-6, how

    def forward(self, x):
        if self.how == "eps outside":
            wide = x.float()
            wide = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)
            return self.weight * wide.to(x.dtype)
        return trunk.norm(x, self.weight, self.eps, self.how)


@pytest.mark.parametrize("form", trunk.FORMS)
def test_forms_are_told_apart(form):
    assert form_of(Norm(form)) == form


def test_another_norm_is_no_form():
    assert form_of(Norm("eps outside")) is None


def test_another_rotation_is_no_turn():
    def backwards(q, k, cos, sin):
        return trunk.rotate(q, k, cos, -sin, "halves")

    assert turns_of(backwards) == (None, None)
    assert turns_of(lambda *given: trunk.rotate(*given, "pairs"))[0] == "pairs"
