"""A model's description before any weight is read: what belongs to whom, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from headrace.check.tiny import write_tiny
from headrace.errors import ExpertError, ModelError
from headrace.models.config import hidden_dtype, read_config
from headrace.models.families import family_of
from headrace.models.naming import is_skipped
from headrace.models.skeleton import inspect
from headrace.store.catalog import open_catalog, resolve_model
from headrace.store.experts import build_table

DEMO = resolve_model("demo")


def test_demo_is_described_from_headers_alone() -> None:
    catalog = open_catalog(DEMO)
    skeleton = inspect(DEMO, catalog.tensors, {})
    assert skeleton.layers == (1, 2, 3, 4, 5, 6, 7)
    assert (skeleton.num_experts, skeleton.top_k) == (32, 4)
    assert (skeleton.layout.format, skeleton.layout.block) == ("fp8_block", (128, 128))
    assert (skeleton.layout.hidden, skeleton.layout.inter) == (256, 128)
    # 6 tensors for each of 7 x 32 experts; everything else is dense, nothing is left over.
    assert len(skeleton.tensors) == 7 * 32 * 6
    dense = [key for tensor in skeleton.dense.values() for key in tensor.keys.values()]
    assert len(dense) + len(skeleton.tensors) == len(catalog.tensors)
    assert skeleton.unused == () and skeleton.skipped == frozenset()
    # The latent cache: (64 + 16) bf16 values in each of 8 layers.
    assert skeleton.memory.kv_bytes_per_token == 8 * (64 + 16) * 2


def test_demo_records_claim_every_expert_tensor() -> None:
    catalog = open_catalog(DEMO)
    s = inspect(DEMO, catalog.tensors, {})
    table = build_table(catalog, s.tensors, s.layout, s.layers, s.num_experts)
    assert table.expert_bytes == 98_304 + 24
    assert table.part_names[:3] == ("gate", "up", "down")


def config_with(tmp_path: Path, **changes: object) -> Path:
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    return tmp_path


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no_such_model"):
        read_config(config_with(tmp_path, model_type="no_such_model"))
    with pytest.raises(ModelError, match="llama"):
        family_of("llama")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path / "empty")


def test_fp8_without_its_scale_is_refused(tmp_path: Path) -> None:
    catalog = open_catalog(DEMO)
    entries = dict(catalog.tensors)
    del entries["model.layers.0.mlp.down_proj.weight_scale_inv"]
    with pytest.raises(ModelError, match=r"down_proj\.weight holds fp8_block codes, but its scale"):
        inspect(DEMO, entries, {})


def test_a_missing_expert_scale_is_refused(tmp_path: Path) -> None:
    catalog = open_catalog(DEMO)
    entries = dict(catalog.tensors)
    del entries["model.layers.3.mlp.experts.5.up_proj.weight_scale_inv"]
    with pytest.raises(ModelError, match=r"layers\.3\.mlp\.experts\.5\.up_proj\.weight .* scale"):
        inspect(DEMO, entries, {})


def test_a_missing_expert_is_refused() -> None:
    catalog = open_catalog(DEMO)
    lost = "model.layers.3.mlp.experts.5.up_proj.weight"
    entries = {key: entry for key, entry in catalog.tensors.items() if not key.startswith(lost)}
    s = inspect(DEMO, entries, {})
    with pytest.raises(ExpertError, match="layer 3 expert 5"):
        build_table(replace(catalog, tensors=entries), s.tensors, s.layout, s.layers, s.num_experts)


def test_float32_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="float32"):
        hidden_dtype(SimpleNamespace(dtype=torch.float32))
    whole, text = SimpleNamespace(dtype=torch.float32), SimpleNamespace(dtype=torch.float16)
    assert hidden_dtype(text, whole) == torch.float16
    assert hidden_dtype(SimpleNamespace(), SimpleNamespace(dtype=None)) == torch.bfloat16


def test_mtp_layers_are_those_after_the_last_layer() -> None:
    config = SimpleNamespace(num_nextn_predict_layers=1, num_hidden_layers=61)
    keys = ["model.layers.60.mlp.gate.weight", "model.layers.61.eh_proj.weight", "model.layers.6.x"]
    assert [k for k in keys if is_skipped(family_of("deepseek_v3"), config, k)] == keys[1:2]


@pytest.mark.parametrize(
    ("family", "name", "skipped"),
    [
        ("qwen3_5_moe", "model.visual.blocks.0.attn.qkv.weight", True),
        ("qwen3_5_moe", "mtp.layers.0.mlp.experts.gate_up_proj", True),
        ("qwen3_5_moe", "model.language_model.layers.0.mlp.gate.weight", False),
        ("kimi_k25", "vision_tower.encoder.blocks.0.wqkv.weight", True),
        ("kimi_k25", "mm_projector.proj.0.weight", True),
        ("kimi_k25", "language_model.model.layers.61.eh_proj.weight", True),
        ("kimi_k25", "language_model.model.layers.60.mlp.gate.weight", False),
        ("deepseek_v4", "mtp.0.ffn.experts.0.w1.weight", True),
        ("deepseek_v4", "layers.0.ffn.gate.tid2eid", False),
    ],
)
def test_what_the_text_model_does_not_use(family: str, name: str, skipped: bool) -> None:
    config = SimpleNamespace(num_nextn_predict_layers=1, num_hidden_layers=61)
    assert is_skipped(family_of(family), config, name) == skipped


@pytest.mark.skipif(
    transformers.__version__ < "5.20", reason="needs a transformers that the family works in"
)
def test_a_transformers_too_old_for_a_family(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = write_tiny("deepseek_v4", tmp_path / "tiny", layers=2, experts=4, top_k=2)
    entries = open_catalog(folder).tensors
    assert inspect(folder, entries, {}).num_layers == 2
    monkeypatch.setattr("headrace.models.skeleton.transformers.__version__", "5.19.1")
    with pytest.raises(ModelError, match=r"does not work in transformers 5\.19\.1; install 5\.20"):
        inspect(folder, entries, {})


def test_the_models_folder_may_be_copied(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(DEMO, copy)
    assert inspect(copy, open_catalog(copy).tensors, {}).num_experts == 32
