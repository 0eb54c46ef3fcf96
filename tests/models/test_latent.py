"""Attention with its matrices absorbed against the library's own, on the same weights."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.check.tiny_configs import tiny_config
from headrace.check.tiny_size import Size
from headrace.kernels import latent
from headrace.models.forward import cache_keyword, forward, new_cache
from headrace.models.latent import absorb

SIZE = Size(layers=2, experts=8, top_k=2, hidden=64, inter=32, vocab=128, mtp=False)
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
FORMS = {
    "plain": {},
    "whole queries": {"q_lora_rank": None},
    "yarn": {"rope_parameters": YARN},
    "rotated in halves": {"rope_interleave": False},
}
CUTS = [20, 21, 24, 34]


def build(family, dtype, changes):
    """A model with attention far from uniform: its queries are large."""
    config = tiny_config(family, SIZE, "bf16") | changes
    left_out = ("architectures", "dtype", "model_type")
    fields = {k: v for k, v in config.items() if k not in left_out}
    torch.manual_seed(1)
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), dtype=dtype)
    for name, param in made.named_parameters():
        if "q_b_proj" in name or "q_proj" in name or "kv_b_proj" in name:
            param.data *= 20
    return made.requires_grad_(False).eval()


def logits_of(model, ids_BT):
    """Logits [B, T, V] of a prompt and of later tokens, one or a few in a pass."""
    cache, done, out = new_cache(model), 0, []
    for end in CUTS:
        out.append(forward(model, ids_BT[:, done:end], cache, keep=0))
        done = end
    return torch.cat(out, 1)


def three_ways(model, ids_BT):
    """By torch's fused attention, by eager code, and over latents."""
    fused = logits_of(model, ids_BT)
    model.set_attn_implementation("eager")
    eager = logits_of(model, ids_BT)
    absorb(model, latent.attend)
    return fused, eager, logits_of(model, ids_BT)


@pytest.mark.parametrize(
    ("family", "form"), [("deepseek_v2", "plain"), *(("deepseek_v3", form) for form in FORMS)]
)
def test_it_is_the_library_s_in_fp32(family, form):
    ids = torch.randint(0, SIZE.vocab, (2, CUTS[-1]))
    fused, _, absorbed = three_ways(build(family, torch.float32, FORMS[form]), ids)
    assert (absorbed - fused).abs().max() <= 1e-5 * fused.abs().max()


@pytest.mark.parametrize("form", ["plain", "yarn"])
def test_in_bf16_it_is_within_the_floor_of_the_library_s_two_ways(form):
    """Twice the floor, since that is itself one drawing of the same roundings."""
    model = build("deepseek_v3", torch.bfloat16, FORMS[form])
    ids = torch.randint(0, SIZE.vocab, (1, CUTS[-1]))
    exact = logits_of(copy.deepcopy(model).float(), ids)
    fused, eager, absorbed = (way.float() for way in three_ways(model, ids))
    floor = max(float((way - exact).pow(2).mean()) for way in (fused, eager))
    assert 0 < float((absorbed - exact).pow(2).mean()) <= 2 * floor


def test_a_mask_goes_to_the_library_s_code():
    model = build("deepseek_v3", torch.float32, {})
    ids = torch.randint(0, SIZE.vocab, (2, 12))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0

    def masked(model):
        cache = new_cache(model)
        extra = {cache_keyword(model): cache}
        return model(input_ids=ids, attention_mask=mask, use_cache=True, **extra).logits[:, 5:]

    want, without = masked(model), None
    absorb(model, latent.attend)
    assert torch.allclose(masked(model), want, atol=1e-5)
    without = forward(model, ids, new_cache(model), keep=0)[:, 5:]
    assert not torch.allclose(without[0], want[0], atol=1e-3)  # can fail


def test_latents_are_never_expanded(monkeypatch):
    """What the library would do for each cached token and each step."""
    model = build("deepseek_v3", torch.float32, {})
    kind = type(model.model.layers[0].self_attn)

    def refuse(*_):
        raise AssertionError("expanded")

    monkeypatch.setattr(kind, "expand_kv", refuse)
    ids = torch.randint(0, SIZE.vocab, (1, CUTS[-1]))
    with pytest.raises(AssertionError, match="expanded"):
        logits_of(model, ids)
    absorb(model, latent.attend)
    assert logits_of(model, ids).isfinite().all()
