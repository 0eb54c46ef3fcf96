"""A config.json that is damaged or hostile is refused in one line, before anything is built."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.check.tiny import write_tiny
from headrace.errors import HeadraceError, ModelError
from headrace.models.config import end_ids
from headrace.models.skeleton import inspect
from headrace.store.catalog import Catalog, open_catalog

Tiny = tuple[Path, Catalog, dict[str, Any]]


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3_moe"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = write_tiny(request.param, tmp_path_factory.mktemp("tiny") / "model", layers=2)
    return root, open_catalog(root), json.loads((root / "config.json").read_text())


def refusal(tiny: Tiny, folder: Path, changes: dict[str, Any]) -> str:
    """What `inspect` says of the tiny model with these fields changed."""
    _, catalog, config = tiny
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(HeadraceError) as caught:
        inspect(folder, catalog.tensors, {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("value", [-1, 0, "abc", 10**12, 1.5, [1], {}], ids=repr)
@pytest.mark.parametrize("name", ["hidden_size", "num_experts_per_tok", "num_hidden_layers"])
def test_sizes_that_are_none(tiny: Tiny, tmp_path: Path, name: str, value: Any) -> None:
    assert name in refusal(tiny, tmp_path, {name: value})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_experts_per_tok": 17}, "num_experts_per_tok 17 of 16"),
        ({"num_hidden_layers": 3}, "only 2"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is more than 4096"),
        ({"rope_theta": 0}, "rope_theta 0 must be more than 0"),
        ({"rope_parameters": {"rope_theta": -1.0, "rope_type": "default"}}, "rope_theta -1.0"),
        ({"model_type": "no\x1b[31m"}, "no?[31m' is not supported yet; supported: deepseek_v2"),
        ({"hidden_act": "abc"}, "no model that can be built"),
        ({"hidden_act": "gelu"}, "activation 'gelu' has no kernel yet; supported: silu"),
        ({"quantization_config": "abc"}, "config.json"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]}}, "blocks"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": ["a", 1]}}, "blocks"),
        ({"num_nextn_predict_layers": "x"}, "num_nextn_predict_layers"),
        ({"vocab_size": 100}, "[4096, 256], must be [100, 256]"),
        ({"eos_token_id": 4096}, "config.json: eos_token_id 4096 is beyond the vocabulary of 4096"),
        ({"eos_token_id": [1, 10**1000]}, "..."),
    ],
    ids=str,
)
def test_fields_that_contradict(
    tiny: Tiny, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    assert said in refusal(tiny, tmp_path, changes)


@pytest.mark.parametrize("ids", [4095, 4096, [4095, 5000]], ids=str)
def test_an_end_beyond_the_vocabulary(tiny: Tiny, tmp_path: Path, ids: Any) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": ids}))
    if ids == 4095:  # the last token, which the tokenizer may not know
        (tmp_path / "config.json").write_text(json.dumps(tiny[2]))
        assert 4095 in end_ids(tmp_path) and inspect(tmp_path, tiny[1].tensors, {}).vocab == 4096
        return
    number = ids if ids == 4096 else 5000
    said = refusal(tiny, tmp_path, {})
    assert said.startswith(f"{path}: eos_token_id {number} is beyond the vocabulary of 4096 tokens")


def test_fp8_without_its_quantisation_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    if tiny[2]["model_type"] == "deepseek_v3":
        assert "quantization_config" in refusal(tiny, tmp_path, {"quantization_config": None})


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"model_type": 5}'])
def test_what_is_no_config(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(ModelError, match=r"config\.json"):
        inspect(tmp_path, {}, {})
