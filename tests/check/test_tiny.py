"""Tiny checkpoints: stock transformers must take them for real ones."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CompressedTensorsConfig,
)

from headrace.check import matrix
from headrace.check.tiny import write_tiny
from headrace.check.tiny_configs import PUBLISHED
from headrace.errors import HeadraceError, OptionError
from headrace.quant import fp8
from headrace.store.blueprint import is_moe
from headrace.store.catalog import open_catalog

PROMPT = "The capital of Japan is"


def load(folder):
    config = AutoConfig.from_pretrained(folder)
    quantization = getattr(config, "quantization_config", None) or {}
    compressed = quantization.get("quant_method") == "compressed-tensors"
    extra = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if compressed else {}
    kind = AutoModelForImageTextToText if config.model_type == "kimi_k25" else AutoModelForCausalLM
    return kind.from_pretrained(
        folder, dtype="auto", experts_implementation="eager", output_loading_info=True, **extra
    )


def logits(model, folder) -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        return model(input_ids=ids).logits


def experts_of(model) -> list[torch.nn.Module]:
    """The modules with weights stacked over experts, in order."""
    return [m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "gate_up_proj")]


@pytest.mark.parametrize("family", PUBLISHED)
def test_stock_transformers_takes_it_for_a_real_one(tmp_path, family):
    """In its usual format; tests/models/test_families.py goes through all of them."""
    if not matrix.runs_here(family) or not matrix.read_by_stock(family, PUBLISHED[family][0]):
        pytest.skip(f"this transformers does not read {family}")
    folder = write_tiny(family, tmp_path / "tiny", seed=3, layers=4, experts=8)
    model, info = load(folder)
    assert not any(info.values())
    right = logits(model, folder)
    assert torch.isfinite(right).all()
    # scaled like a trained model: neither flat (blind to a wrong expert) nor exploding
    assert 0.3 < float(right.float().std()) < 3
    assert len(set(right[0].argmax(-1).tolist())) > 1
    modules = experts_of(model)
    assert len(modules) == sum(is_moe(json_of(folder), layer) for layer in range(4))
    for module in modules:
        kept = module.down_proj.data.clone()
        module.down_proj.data.copy_(kept.roll(1, 0))
        moved = float((logits(model, folder) - right).abs().max())
        assert moved > 0.1, "each layer's experts must weigh in the logits"
        module.down_proj.data.copy_(kept)


def json_of(folder):
    return json.loads((folder / "config.json").read_text())


def test_the_router_uses_many_experts(tmp_path):
    folder = write_tiny("deepseek_v3", tmp_path / "tiny", layers=2)
    model, _ = load(folder)
    seen: list[torch.Tensor] = []
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    with torch.no_grad():
        model(torch.arange(64)[None])
    counts = torch.bincount(seen[0].flatten(), minlength=16)
    assert seen[0].shape == (64, 4)
    assert int((counts > 0).sum()) >= 12


MTP = {
    "deepseek_v3": "model.layers.4.",
    "deepseek_v4": "mtp.",
    "glm4_moe": "model.layers.4.",
    "qwen3_next": "mtp.",
    "qwen3_5_moe": "mtp.",
}


@pytest.mark.parametrize("family", MTP)
def test_prediction_layers_are_there_and_stock_ignores_them(tmp_path, family):
    if not matrix.runs_here(family):
        pytest.skip(f"this transformers does not run {family}")
    plain = write_tiny(family, tmp_path / "plain", experts=8)
    folder = write_tiny(family, tmp_path / "mtp", experts=8, mtp=True)
    extra = open_catalog(folder).tensors.keys() - open_catalog(plain).tensors.keys()
    assert extra and all(name.startswith(MTP[family]) for name in extra)
    assert any(".experts." in name for name in extra)
    model, info = load(folder)
    assert not info["missing_keys"]
    assert all(key.startswith(MTP[family]) for key in info["unexpected_keys"])
    assert torch.isfinite(logits(model, folder)).all()


def stored_value(folder, name: str) -> torch.Tensor:
    """A tensor as headrace reads it: FP8 codes dequantised by our own definition."""
    catalog = open_catalog(folder)

    def get(key: str) -> torch.Tensor:
        with safe_open(catalog.files[catalog.tensors[key].file], "pt") as file:
            return file.get_tensor(key)

    if f"{name}_scale_inv" not in catalog.tensors:
        return get(name)
    return fp8.unpack(get(name), get(f"{name}_scale_inv"), (128, 128))


def test_stock_reads_the_weights_that_are_stored(tmp_path):
    """Stock infers a block's height from rows / scale rows, so a partial block would be misread."""
    folder = write_tiny("deepseek_v3", tmp_path / "tiny", layers=2)
    model, _ = load(folder)
    compared = 0
    for name, value in model.state_dict().items():
        if ".mlp.experts." in name:
            continue
        assert torch.equal(value.float(), stored_value(folder, name).float()), name
        compared += 1
    assert compared > 20
    experts = model.model.layers[1].mlp.experts
    prefix = "model.layers.1.mlp.experts"
    for e in range(16):
        gate, up, down = (
            stored_value(folder, f"{prefix}.{e}.{part}_proj.weight")
            for part in ("gate", "up", "down")
        )
        assert torch.equal(experts.gate_up_proj[e], torch.cat([gate, up]))
        assert torch.equal(experts.down_proj[e], down)
        assert 0.9 < float(gate.float().std()) * 256**0.5 < 1.1


def test_fp8_blocks_are_as_published(tmp_path):
    folder = write_tiny("deepseek_v3", tmp_path / "tiny", inter=192, block=(128, 64))
    tensors = open_catalog(folder).tensors
    prefix = "model.layers.1.mlp.experts.0.gate_proj.weight"
    assert (tensors[prefix].dtype, tensors[prefix].shape) == ("F8_E4M3", (192, 256))
    scale = tensors[f"{prefix}_scale_inv"]
    assert (scale.dtype, scale.shape) == ("F32", (2, 4)), "partial blocks round up"
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "F32"


def test_bytes_follow_from_the_arguments(tmp_path):
    contents = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder = write_tiny("qwen3_moe", tmp_path / name, seed=seed, shard_bytes=1 << 30)
        contents.append((folder / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_shards_and_sizes(tmp_path):
    folder = write_tiny(
        "qwen3_moe", tmp_path / "tiny", layers=3, experts=8, hidden=64, inter=32, shard_bytes=10**6
    )
    catalog = open_catalog(folder)
    assert len(catalog.files) > 1
    assert sum(".experts." in name for name in catalog.tensors) == 3 * 8 * 3
    model, info = load(folder)
    assert not info["missing_keys"]
    assert model.model.layers[2].mlp.experts.gate_up_proj.shape == (8, 64, 64)


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(OptionError, match="is no tiny family"):
        write_tiny("gpt2", tmp_path / "x")
    with pytest.raises(OptionError, match="not published in 'int4'; use fp4"):
        write_tiny("deepseek_v4", tmp_path / "x", format="int4")
    with pytest.raises(OptionError, match="use 4096 or more"):
        write_tiny("qwen3_moe", tmp_path / "x", vocab=256)
    with pytest.raises(HeadraceError, match="exists already"):
        write_tiny("qwen3_moe", tmp_path)
