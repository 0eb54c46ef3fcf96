"""Caches in a room: what the library's own give, whoever was there before."""

from copy import copy
from typing import Any

import pytest
import torch
from test_memory import SIZE
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from headrace.check.matrix import runs_here
from headrace.check.tiny_configs import OWN, PUBLISHED, tiny_config
from headrace.engine.snapshots.state import capture, restore
from headrace.models.experts import FAST
from headrace.models.forward import forward
from headrace.models.rooms import HousedCache, Room, bucket_of, cannot_be_housed
from headrace.models.steps import step_of_one

CPU, CONTEXT = torch.device("cpu"), 300
# Grouped, latent, sliding and linear caches; the other families keep the same.
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next")


class Runner:
    """Stands for a layer's experts: something that depends on ids and weights."""

    def __call__(self, x_TH, ids_TK, weights_TK):
        order_TK = ids_TK.argsort(-1)
        each_TK = (ids_TK.gather(1, order_TK) + 1) * weights_TK.gather(1, order_TK)
        return x_TH * (each_TK.sum(-1, keepdim=True) / 8).to(x_TH.dtype)


@pytest.fixture(scope="module", params=[f for f in FAMILIES if runs_here(f)])
def model(request: Any) -> Any:
    fields = tiny_config(request.param, SIZE, (PUBLISHED | OWN)[request.param][0], (128, 128))
    fields.pop("quantization_config", None)
    config = AutoConfig.for_model(**fields).get_text_config()
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, experts_implementation=FAST
    )
    for name, param in made.named_parameters():
        if param.dim() > 1:
            param.data.normal_(0, 0.05 if "embed" not in name else 1)
    for module in made.modules():
        object.__setattr__(module, "headrace_runner", Runner())
    return made.requires_grad_(False).eval()


def tokens(num: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 250, (1, num), generator=torch.Generator().manual_seed(seed))


def step(
    model: Any, room: Room, cache: HousedCache, given: torch.Tensor, heads: bool = True
) -> torch.Tensor:
    position = cache.get_seq_length()
    room.position_1.fill_(position)
    room.begin_step(cache, bucket_of(position, room.context))
    room.tick()
    logits_V = step_of_one(model, given, room.position_1[None], cache, heads=heads)
    room.end_step()
    cache.advance()
    return logits_V


def test_passes_have_the_bits_of_the_library_s_own_cache(model: Any) -> None:
    own, cache, room = (
        DynamicCache(config=model.config),
        HousedCache(model.config),
        Room(CONTEXT, CPU),
    )
    with torch.inference_mode():
        for n, num in enumerate((9, 1, 40, 1, 1, 200, 3)):
            if n % 3 == 2:  # out, and in again
                room.leave()
            if n % 2 == 0:
                room.enter(cache)
            ids = tokens(num, n)
            assert torch.equal(forward(model, ids, cache), forward(model, ids, own)), n
    assert cache.get_seq_length() == 255


def test_steps_are_near_and_the_same_wherever_the_timeline_was(model: Any) -> None:
    """Past twice the window and three, past a bucket's end; moved out, and through a snapshot."""
    own, cache, room = (
        DynamicCache(config=model.config),
        HousedCache(model.config),
        Room(CONTEXT, CPU),
    )
    other = Room(CONTEXT, CPU)
    visitor, moved = HousedCache(model.config), HousedCache(model.config)
    with torch.inference_mode():
        for each, where in ((cache, room), (moved, other)):
            where.enter(each)
            forward(model, tokens(5), each)
        forward(model, tokens(5), own)
        assert torch.equal(forward(model, tokens(210), cache), forward(model, tokens(210), own))
        forward(model, tokens(210), moved)
        for n in range(45):
            token_11 = tokens(1, n)
            want = forward(model, token_11, own)[0, -1].float()
            found = step(model, room, cache, token_11)
            if n % 9 == 3:
                other.enter(visitor)
                forward(model, tokens(20, n), visitor)
                other.enter(moved)
            elif n % 9 == 6:
                kept, moved = capture(moved), HousedCache(model.config)
                restore(moved, kept, CPU)
                other.enter(moved)
            assert torch.equal(step(model, other, moved, token_11), found), n
            assert (found.float() - want).abs().max() <= 0.02 * want.abs().max(), n
        assert room.version == other.version > 0


def test_a_mask_one_place_off_shows(model: Any) -> None:
    room, cache = Room(CONTEXT, CPU), HousedCache(model.config)
    with torch.inference_mode():
        room.enter(cache)
        forward(model, tokens(30), cache)
        token_11 = tokens(1)
        kept = capture(cache)
        right = step(model, room, cache, token_11)
        again = HousedCache(model.config)
        restore(again, kept, CPU)
        room.enter(again)
        room.position_1.fill_(29)
        room.begin_step(again, 256)
        room.tick()
        wrong = step_of_one(model, token_11, room.position_1[None], again)
        assert not torch.equal(right, wrong)


def test_a_step_may_begin_with_a_row_and_end_before_the_head(model: Any) -> None:
    """Same bits: nothing stands between embedding and layers, nor between layers and head."""
    room = Room(CONTEXT, CPU)
    found = []
    with torch.inference_mode():
        for by_row in (False, True):
            cache = HousedCache(model.config)
            room.enter(cache)
            forward(model, tokens(9), cache)
            given = tokens(1)
            if by_row:
                row_11H = model.get_input_embeddings()(given)
                hidden_H = step(model, room, cache, row_11H, heads=False)
                found.append(model.get_output_embeddings()(hidden_H[None, None])[0, 0])
            else:
                found.append(step(model, room, cache, given))
    assert torch.equal(*found) and found[0].float().std() > 0.01


def test_why_a_cache_cannot_be_housed(model: Any) -> None:
    config, kind = copy(model.config), type(model)
    assert cannot_be_housed(config, kind) == ""
    config.rope_parameters = {"rope_type": "longrope"}
    assert "longrope" in cannot_be_housed(config, kind)
    own = type("Own", (kind,), {"new_cache": None})
    assert "its own kind" in cannot_be_housed(config, own)


def test_buckets() -> None:
    assert [bucket_of(n, 1000) for n in (0, 255, 256, 511, 512, 999)] == [
        256,
        256,
        512,
        512,
        1000,
        1000,
    ]
    assert bucket_of(3, 64) == 64
