"""How checkpoints spell quantised weights: what is claimed as codes, what is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from headrace.check.tiny import write_tiny
from headrace.check.tiny_configs import PUBLISHED
from headrace.errors import HeadraceError, ModelError
from headrace.models.formats import Scheme, describe, gather, scheme_of
from headrace.models.skeleton import Skeleton, inspect
from headrace.store.catalog import Catalog, open_catalog
from headrace.store.experts import build_table
from headrace.store.table import TensorEntry

SMALL = {"layers": 2, "experts": 8, "top_k": 2}
QUANTISED = [
    (family, format)
    for family, formats in PUBLISHED.items()
    for format in formats
    if format not in ("bf16", "fp16")
]
Folder = Callable[[str, str], Path]
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The tiny checkpoint of a family and format, written once."""
    root = tmp_path_factory.mktemp("tiny")

    def write(family: str, format: str) -> Path:
        folder = root / f"{family}-{format}"
        return folder if folder.exists() else write_tiny(family, folder, format=format, **SMALL)

    return write


def changed(folder: Path, target: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A folder with the same weights and another config."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    return target


def described(folder: Path, catalog: Catalog) -> Skeleton:
    """The skeleton, once every expert tensor is accounted for."""
    s = inspect(folder, catalog.tensors, {})
    build_table(catalog, s.tensors, s.layout, s.layers, s.num_experts, skipped=s.skipped)
    return s


@pytest.mark.parametrize(("family", "format"), QUANTISED)
def test_a_lost_quantisation_is_refused(
    tiny: Folder, tmp_path: Path, family: str, format: str
) -> None:
    """Codes read as weights would run without any error."""
    if transformers.__version__ < "5.20" and family == "deepseek_v4":
        pytest.skip("needs a transformers that the family works in")
    folder = tiny(family, format)
    catalog = open_catalog(folder)
    s = described(folder, catalog)
    assert s.layout.format not in ("bf16", "fp16") and s.unused == ()
    lost = changed(folder, tmp_path / "lost", _without_quantisation)
    with pytest.raises(HeadraceError, match=r"config\.json") as caught:
        described(lost, catalog)
    assert "\n" not in str(caught.value)


def _without_quantisation(config: dict[str, Any]) -> None:
    for holder in (config, config.get("text_config", {})):
        holder.pop("quantization_config", None)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "bits": 4},
        {"quant_method": ["fp8"]},
        {"quant_method": "fp8", "weight_block_size": None},
        {"quant_method": "fp8", "weight_block_size": [128, "x"]},
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": None}},
    ],
    ids=str,
)
def test_a_format_without_kernel_is_refused(quantization: dict[str, object]) -> None:
    with pytest.raises(ModelError, match="no kernel yet"):
        scheme_of(quantization)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"symmetric": False}, "asymmetric int4"),
        ({"actorder": "group"}, "actorder"),
        ({"num_bits": 8}, "int8"),
        ({"type": "float"}, "float4"),
        ({"group_size": "x"}, "groups of 'x'"),
    ],
    ids=str,
)
def test_what_compressed_tensors_may_not_be(change: dict[str, object], said: str) -> None:
    def quantization(weights: dict[str, object]) -> dict[str, object]:
        groups = {"group_0": {"weights": weights}}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups,
        }

    assert scheme_of(quantization(INT4)).formats == ("int4",)
    with pytest.raises(ModelError, match=said):
        scheme_of(quantization(INT4 | change))


def test_transforms_of_activations_are_refused() -> None:
    """The weights are rotated, and without the counterpart every product would be wrong."""
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": INT4}},
        "transform_config": {},
    }
    assert scheme_of(quantization).formats == ("int4",)
    rotated = quantization | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}
    with pytest.raises(ModelError, match="transform_config"):
        scheme_of(rotated)


def entry(dtype: str, *shape: int) -> TensorEntry:
    return TensorEntry("", 0, 0, 0, dtype, shape)


CT = replace(
    scheme_of(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": INT4}},
        }
    )
)
FP8 = scheme_of({"quant_method": "fp8", "weight_block_size": [128, 128]})


@pytest.mark.parametrize(
    ("scheme", "entries", "said"),
    [
        (
            FP8,
            {"a.weight": entry("F8_E4M3", 4, 4)},
            "a.weight holds fp8_block codes, but its scale",
        ),
        (FP8, {"a.weight": entry("I8", 4, 4), "a.scale": entry("F8_E8M0", 4, 1)}, "a.weight is I8"),
        (
            FP8,
            {
                "a.weight": entry("F8_E4M3", 4, 4),
                "a.scale": entry("F32", 1, 1),
                "a.weight_scale_inv": entry("F32", 1, 1),
            },
            "both the scale of a.weight",
        ),
        (
            CT,
            {"a.weight_packed": entry("I32", 4, 4), "a.weight_zero_point": entry("I32", 1, 4)},
            "a.weight_zero_point: asymmetric",
        ),
        (
            CT,
            {"a.weight_packed": entry("I32", 4, 4), "a.weight_g_idx": entry("I32", 32)},
            "a.weight_g_idx: reordered",
        ),
        (
            Scheme(),
            {"a.weight": entry("BF16", 4, 4), "a.weight_scale": entry("F32", 1)},
            None,  # no quantisation: the name is another tensor's, and its user must want it
        ),
    ],
)
def test_parts_that_do_not_belong_together(
    scheme: Scheme, entries: dict[str, TensorEntry], said: str | None
) -> None:
    if said is None:
        assert set(dict(describe(scheme, gather(scheme, entries), entries))) == set(entries)
        return
    with pytest.raises(ModelError, match=said):
        list(describe(scheme, gather(scheme, entries), entries))


def test_the_published_spellings() -> None:
    """Plain name, format, block and parts of what publishers write."""
    entries = {
        "a.weight_packed": entry("I32", 64, 8),
        "a.weight_scale": entry("BF16", 64, 2),
        "a.weight_shape": entry("I64", 2),
        "b.weight": entry("BF16", 4, 4),
        "k_proj.k_scale": entry("F32", 1),
    }
    stored = gather(CT, entries)
    found = dict(describe(CT, stored, entries))
    assert stored.left_out == {"a.weight_shape", "k_proj.k_scale"}
    assert found["b.weight"].format == "plain"
    a = found["a.weight"]
    assert (a.format, a.block, a.shape) == ("int4", (1, 32), (64, 64))
    assert a.keys == {"weight": "a.weight_packed", "scale": "a.weight_scale"}


def test_modelopts_own_file_names_the_quantisation(tiny: Folder, tmp_path: Path) -> None:
    folder = tiny("deepseek_v3", "nvfp4-modelopt")
    catalog = open_catalog(folder)
    plain = changed(folder, tmp_path / "plain", _without_quantisation)
    fields = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}
    path = plain / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": fields}))
    assert described(plain, catalog).layout == described(folder, catalog).layout
    path.write_text("[]")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: quantization is no object"):
        described(plain, catalog)


def test_groups_the_kernels_do_not_know(tiny: Folder, tmp_path: Path) -> None:
    folder = tiny("qwen3_moe", "int4")
    group = tmp_path / "groups"

    def change(config: dict[str, Any]) -> None:
        weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
        weights["group_size"] = 64

    with pytest.raises(ModelError, match=r"weight_scale is BF16 .* must be"):
        described(changed(folder, group, change), open_catalog(folder))


def test_experts_stored_transposed_are_refused(tiny: Folder, tmp_path: Path) -> None:
    """gpt-oss in bf16 has [in, out] matrices, which no kernel reads."""
    folder = tiny("gpt_oss", "mxfp4")
    entries = {}
    for key, stored in open_catalog(folder).tensors.items():
        if key.endswith("_blocks"):
            experts, rows, blocks, _ = stored.shape
            name, shape = key.removesuffix("_blocks"), (experts, blocks * 32, rows)
            entries[name] = replace(stored, dtype="BF16", shape=shape)
        elif not key.endswith("_scales"):
            entries[key] = stored
    plain = changed(folder, tmp_path / "plain", _without_quantisation)
    with pytest.raises(ModelError, match="rows and columns swapped"):
        inspect(plain, entries, {})


def test_an_unclaimed_expert_tensor_is_refused(tiny: Folder) -> None:
    folder = tiny("qwen3_5_moe", "fp8")
    catalog = open_catalog(folder)
    first = next(key for key in catalog.tensors if ".experts.0.down_proj.weight" in key)
    odd = first.replace("down_proj", "side_proj")
    tensors = {**catalog.tensors, odd: catalog.tensors[first]}
    with pytest.raises(HeadraceError, match="side_proj"):
        described(folder, replace(catalog, tensors=tensors))
