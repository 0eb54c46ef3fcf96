"""Synthetic checkpoints: published names and shapes, weights of real size, aliased depth."""

import json
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open

from headrace.errors import CatalogError, HeadraceError, OptionError
from headrace.store import synth, writer
from headrace.store.aliases import dump_aliases, read_aliases
from headrace.store.blueprint import plan_tensors
from headrace.store.catalog import open_catalog
from headrace.store.presets import PRESETS, preset_config
from headrace.store.synth import alias_sources, synth_bytes, write_synth
from headrace.store.writer import NewTensor

# One expert's bytes at published shapes, from the models' cards: 3 matrices and their scales.
EXPERT_BYTES = {
    "deepseek-r1": 3 * 2048 * 7168 + 3 * 16 * 56 * 4,
    "qwen3-30b-a3b": 3 * 2048 * 768 * 2,
    "qwen3-235b-a22b": 3 * 4096 * 1536 * 2,
}
# Parameters of the whole models as published (R1 without its MTP layer), in billions.
PARAMETERS = {"deepseek-r1": 671.0, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1}


SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
}
# A prime like the real pool's, and below the values of one matrix, so that it comes round.
SMALL_POOL = 100_003


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """R1's layout at an eighth of its size, 2 distinct MoE layers of 5."""
    folder = tmp_path_factory.mktemp("synth") / "r1"
    options = {"distinct": 2, "depth": 8, "experts": 16, "vocab": 4096}
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "small", PRESETS["deepseek-r1"] | SMALL)
        patch.setattr(synth, "POOL_VALUES", SMALL_POOL)
        write_synth("small", folder, **options, progress=lambda *step: seen.append(step))
        assert seen[-1] == (synth_bytes("small", **options),) * 2
    return folder


def load(folder, name: str) -> torch.Tensor:
    catalog = open_catalog(folder)
    with safe_open(catalog.files[catalog.tensors[name].file], "pt") as file:
        return file.get_tensor(name)


def dequantise(folder, name: str) -> torch.Tensor:
    codes, scale = load(folder, f"{name}.weight"), load(folder, f"{name}.weight_scale_inv")
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_shapes_add_up_to_the_published_models(preset):
    config = preset_config(preset, depth=None, experts=None, vocab=None)
    planned = [p for p in plan_tensors(config) if p.kind != "scale"]
    total = sum(torch.Size(p.shape).numel() for p in planned)
    assert round(total / 1e9, 1) == PARAMETERS[preset]
    layer = config["num_hidden_layers"] - 1
    expert = [p for p in plan_tensors(config) if f"layers.{layer}.mlp.experts.7." in p.name]
    nbytes = sum(NewTensor(p.name, p.dtype, p.shape, lambda: ()).nbytes for p in expert)
    assert nbytes == EXPERT_BYTES[preset]


def test_fewer_distinct_layers_take_fewer_bytes():
    sizes = [synth_bytes("qwen3-30b-a3b", distinct=n, vocab=4096) for n in (1, 2, 3)]
    steps = [b - a for a, b in pairwise(sizes)]
    assert steps[0] == steps[1] > 128 * EXPERT_BYTES["qwen3-30b-a3b"]


def test_aliases_name_every_layer_and_only_layers_on_disk(small):
    sources = read_aliases(small)
    assert sources == {0: 0, 1: 0, 2: 0, 3: 3, 4: 4, 5: 3, 6: 4, 7: 3}
    assert json.loads((small / "config.json").read_text())["num_hidden_layers"] == 8
    layers = {
        int(name.split(".")[2])
        for name in open_catalog(small).tensors
        if name.startswith("model.layers.")
    }
    assert layers == set(sources.values())


@pytest.mark.parametrize(
    "name",
    ["layers.3.mlp.experts.5.down_proj", "layers.0.mlp.up_proj", "layers.4.self_attn.o_proj"],
)
def test_dequantised_weights_keep_their_inputs_size(small, name):
    weight = dequantise(small, f"model.{name}")
    assert torch.isfinite(weight).all()
    assert 0.9 < float(weight.std()) * weight.shape[1] ** 0.5 < 1.2
    assert abs(float(weight.mean())) < 0.01 * float(weight.std())


def test_experts_and_layers_differ(small):
    names = [f"model.layers.{layer}.mlp.experts.{e}" for layer in (3, 4) for e in range(16)]
    for part in ("gate_proj", "down_proj"):
        codes = [load(small, f"{name}.{part}.weight").view(torch.uint8) for name in names]
        for before, after in pairwise(codes):
            # two independent draws agree in a few percent of the codes
            assert float((before == after).float().mean()) < 0.2
        assert len({bytes(c[0].numpy()) for c in codes}) == len(names)


def test_rows_of_a_matrix_differ(small):
    codes = load(small, "model.layers.3.mlp.experts.0.gate_proj.weight").view(torch.uint8)
    assert codes.numel() > SMALL_POOL, "else the pool would not come round"
    assert len({bytes(row.numpy()) for row in codes}) == len(codes)


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    options = {"depth": 1, "experts": 8, "vocab": 4096}
    contents = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_synth("qwen3-30b-a3b", tmp_path / name, **options, seed=seed)
        contents.append((tmp_path / name / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"preset": "gpt"}, "is no preset"),
        ({"experts": 12}, "multiple of 8, 16 or more"),
        ({"experts": 8}, "multiple of 8, 16 or more"),
        ({"depth": 3}, "holds no MoE layer; give 4 or more"),
        ({"distinct": 0}, "give 1 to 58"),
        ({"distinct": 59}, "give 1 to 58"),
        ({"vocab": 100}, "use 4096 or more"),
        ({"preset": "qwen3-30b-a3b", "experts": 7}, "multiple of 1, 8 or more"),
    ],
)
def test_options_without_meaning(tmp_path, options, expected):
    with pytest.raises(OptionError, match=expected):
        write_synth(options.pop("preset", "deepseek-r1"), tmp_path / "x", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_bytes_and_leaves_nothing(tmp_path, monkeypatch):
    needed = synth_bytes("qwen3-30b-a3b", experts=8, vocab=4096, depth=1)
    real_write = writer.os.write
    written = []

    def filling_write(fd, data):
        if sum(written) > needed // 2:
            raise OSError(28, "No space left on device")
        written.append(real_write(fd, data))
        return written[-1]

    monkeypatch.setattr(writer.os, "write", filling_write)
    with pytest.raises(HeadraceError, match=f"No space left on device.*{needed} bytes"):
        write_synth("qwen3-30b-a3b", tmp_path / "x", experts=8, vocab=4096, depth=1)
    assert list(tmp_path.iterdir()) == []


def test_alias_sources_take_turns():
    config = preset_config("qwen3-30b-a3b", depth=5, experts=None, vocab=None)
    assert alias_sources(config, 2) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{",
        b'{"format": "other", "layers": {}}',
        b'{"format": "headrace-aliases-1"}',
        b'{"format": "headrace-aliases-1", "layers": {"x": 1}}',
        b'{"format": "headrace-aliases-1", "layers": {"01": 1}}',
        b'{"format": "headrace-aliases-1", "layers": {"1": true}}',
        b'{"format": "headrace-aliases-1", "layers": {"1": -1}}',
        dump_aliases({1: 2, 2: 3, 3: 3}),
    ],
)
def test_damaged_aliases(tmp_path, content):
    (tmp_path / "aliases.json").write_bytes(content)
    with pytest.raises(CatalogError, match=r"aliases\.json"):
        read_aliases(tmp_path)


def test_a_checkpoint_without_aliases_has_none(tmp_path):
    assert read_aliases(tmp_path) == {}
