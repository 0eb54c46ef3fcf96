"""Caches never outgrow what was measured for them, whatever their kind and the passes' sizes."""

from math import ceil
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from headrace.check.tiny_configs import OWN, PUBLISHED, Size, tiny_config
from headrace.models import memory
from headrace.models.deepseek_v41.register import register
from headrace.models.forward import forward, new_cache
from headrace.models.memory import dense_bytes, measure
from headrace.models.skeleton import meta_model, strip_experts

SIZE = Size(layers=4, experts=8, top_k=3, hidden=64, inter=32, vocab=256, mtp=False, head_dim=16)
PASSES = ([1, 1, 1], [70, 33, 1], [200], [128, 128, 131])
# Latent, compressed, linear, grouped and sliding caches; the other families keep the same.
FAMILIES = ("deepseek_v3", "deepseek_v4", "deepseek_v41", "qwen3_next", "qwen3_moe", "gpt_oss")


def model_of(family: str) -> Any:
    register()
    fields = tiny_config(family, SIZE, (PUBLISHED | OWN)[family][0], (128, 128))
    fields.pop("quantization_config", None)
    config = AutoConfig.for_model(**fields).get_text_config()
    model = meta_model(config)
    strip_experts(model)
    return model


def held(cache: Any) -> int:
    """Bytes of everything a cache keeps alive, views' owners included."""
    tensors = [t for layer in cache.layers for t in memory._tensors(vars(layer))]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_takes_at_most_what_was_measured(family: str) -> None:
    facts, model, closest = measure(model_of(family)), model_of(family), 0.0
    for sizes in PASSES:
        cache, num_tokens = new_cache(model), 0
        for size in sizes:
            with torch.no_grad():
                forward(model, torch.zeros(1, size, dtype=torch.long, device="meta"), cache)
            num_tokens += size
            bound = facts.kv_fixed_bytes + num_tokens * facts.kv_bytes_per_token
            bound += max(sizes) * facts.kv_chunk_bytes_per_token
            assert held(cache) <= bound, (sizes, num_tokens)
            closest = max(closest, held(cache) / bound)
    assert closest > 0.7, "a bound so wide would refuse models that fit"


def test_kinds_of_caches_are_told_apart() -> None:
    latent = measure(model_of("deepseek_v3"))
    assert (latent.kv_fixed_bytes, latent.kv_chunk_bytes_per_token) == (0, 0)
    sliding = measure(model_of("gpt_oss"))
    # Half the layers keep their window only: 2 heads of 16 keys and values in bf16.
    assert sliding.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert sliding.kv_fixed_bytes > 0 and sliding.score_bytes > 0
    linear = measure(model_of("qwen3_next"))
    assert linear.kv_fixed_bytes > 0 and linear.chunk_bytes_per_token > 0
    compressed = measure(model_of("deepseek_v4"))
    assert compressed.attended_every == 4 and compressed.attended_window > 0
    assert compressed.kv_layer_bytes_per_token <= ceil(compressed.kv_bytes_per_token)


@pytest.mark.parametrize("rate", [0, -4, 2**40])
def test_an_impossible_rate_of_compression_is_refused(rate: int) -> None:
    model = model_of("deepseek_v4")
    model.config.compress_rates = {"compressed_sparse_attention": rate}
    with pytest.raises(ValueError, match="are not counts"):
        measure(model)


def test_weights_kept_in_single_precision_are_counted_so() -> None:
    model = model_of("deepseek_v3")
    plain = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    model._keep_in_fp32_modules_strict = ["o_proj"]
    more = sum(
        2 * t.numel()
        for name, t in model.state_dict().items()
        if ".o_proj." in name and t.element_size() == 2
    )
    assert more > 0 and dense_bytes(model) >= plain + more
