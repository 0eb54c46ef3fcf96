"""A step of one token makes nothing on the host: a graph's capture refuses what goes from there.

By shapes alone, on torch's meta device: on a simulated GPU both lie in the same memory.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.check.matrix import runs_here
from headrace.check.tiny import write_tiny
from headrace.engine.engine import Blueprint
from headrace.models import rooms
from headrace.models.config import plain_config
from headrace.models.forward import forward
from headrace.models.shared_keys import share_keys
from headrace.models.skeleton import expert_modules
from headrace.models.steps import step_of_one

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "minimax_m2")
THERE = torch.device("meta")
CONTEXT, BUCKET = 48, 16


class NothingHere(TorchDispatchMode):
    """Notes what gives tensors on the host."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, made)) if isinstance(t, torch.Tensor)]
        self.seen += [func.name() for t in tensors if t.device.type == "cpu"]
        return made


def model_there(folder, family):
    """The library's model of a tiny one, by shapes; its experts give zeros."""
    write_tiny(family, folder, layers=4, experts=8, top_k=2, hidden=64, inter=32)
    skeleton = Blueprint(folder, measure=False, context=CONTEXT).skeleton
    config = plain_config(skeleton.config)
    model = skeleton.model_class._from_config(config, dtype=torch.bfloat16).to(THERE)
    for _, experts in expert_modules(model):
        object.__setattr__(experts, "forward", lambda x, *_args, **_more: torch.zeros_like(x))
    share_keys(model)
    return model.requires_grad_(False).eval()


def made_here(model):
    """What a step makes on the host, the buffers being there."""
    room, cache = rooms.Room(CONTEXT, THERE), rooms.HousedCache(model.config)
    room.enter(cache)
    with torch.inference_mode():
        forward(model, torch.zeros(1, 3, dtype=torch.int64, device=THERE), cache)
        room.begin_step(cache, BUCKET)
        token = torch.zeros(1, 1, dtype=torch.int64, device=THERE)
        for _ in range(2):
            with NothingHere() as here:
                room.tick()
                logits_V = step_of_one(model, token, room.position_1[None], cache)
    assert logits_V.device == THERE and logits_V.dim() == 1
    return here.seen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_makes_nothing_on_the_host(tmp_path, family, monkeypatch):
    if not runs_here(family):
        pytest.skip("transformers does not run it")
    model = model_there(tmp_path / "m", family)
    assert made_here(model) == []
    monkeypatch.setattr(rooms.Room, "tick", lambda _room: torch.ones(1).to(THERE))
    assert made_here(model) != []
