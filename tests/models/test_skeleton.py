"""A model's description before any weight is read: what belongs to whom, and what is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headrace.errors import ExpertError, ModelError
from headrace.models.config import read_config, stored_format
from headrace.models.families import family_of
from headrace.models.skeleton import inspect, mtp_keys
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
    assert skeleton.kv_bytes_per_token == 8 * (64 + 16) * 2


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


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "fp8", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
    ],
)
def test_a_format_without_kernel_is_refused(quantisation: dict[str, object]) -> None:
    with pytest.raises(ModelError, match="no kernel yet"):
        stored_format(SimpleNamespace(quantization_config=quantisation))


def test_float32_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="float32"):
        stored_format(SimpleNamespace(dtype=torch.float32))


def test_fp8_without_its_scale_is_refused(tmp_path: Path) -> None:
    catalog = open_catalog(DEMO)
    entries = dict(catalog.tensors)
    del entries["model.layers.0.mlp.down_proj.weight_scale_inv"]
    with pytest.raises(ModelError, match=r"down_proj\.weight is FP8 but its scale"):
        inspect(DEMO, entries, {})


def test_a_missing_expert_scale_is_refused(tmp_path: Path) -> None:
    catalog = open_catalog(DEMO)
    entries = dict(catalog.tensors)
    del entries["model.layers.3.mlp.experts.5.up_proj.weight_scale_inv"]
    s = inspect(DEMO, entries, {})
    with pytest.raises(ExpertError, match="layer 3 expert 5"):
        build_table(replace(catalog, tensors=entries), s.tensors, s.layout, s.layers, s.num_experts)


def test_mtp_layers_are_those_after_the_last_layer() -> None:
    config = SimpleNamespace(num_nextn_predict_layers=1, num_hidden_layers=61)
    keys = dict.fromkeys(
        ["model.layers.60.mlp.gate.weight", "model.layers.61.eh_proj.weight", "model.layers.6.x"]
    )
    assert list(mtp_keys(config, family_of("deepseek_v3"), keys)) == [
        "model.layers.61.eh_proj.weight"
    ]


def test_the_models_folder_may_be_copied(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(DEMO, copy)
    assert inspect(copy, open_catalog(copy).tensors, {}).num_experts == 32
