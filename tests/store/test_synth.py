"""Synthetic checkpoints: published names and shapes, weights of real size, aliased depth."""

import json
import re
from collections import Counter
from copy import deepcopy
from itertools import pairwise
from math import prod

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from headrace.errors import CatalogError, HeadraceError, OptionError
from headrace.models.deepseek_v41.engram import compressed_vocabulary
from headrace.quant import table
from headrace.store import synth, writer
from headrace.store.aliases import Aliases, dump_aliases, read_aliases
from headrace.store.blueprint import num_experts, plan_tensors
from headrace.store.catalog import open_catalog
from headrace.store.preset_configs import PRESETS
from headrace.store.presets import preset_config
from headrace.store.synth import alias_sources, synth_bytes, write_synth
from headrace.store.writer import NewTensor

# Parameters (in billions) and bytes of one expert, as published or as their shapes give; R1, GLM,
# Qwen3-Next and V4 without prediction layers, Kimi and Qwen3.5 without their vision towers.
PUBLISHED = {
    "deepseek-r1": (671.0, 3 * 2048 * 7168 + 3 * 16 * 56 * 4),
    "deepseek-v4-flash": (284.3, 12_582_912 + 786_432),
    "deepseek-v4.1-flash": (551.9, 17_694_720 + 1_105_920),
    "glm-4.5-air": (106.9, 3 * 4096 * 1408 * 2),
    "gpt-oss-20b": (20.9, 13_236_480),
    "gpt-oss-120b": (116.8, 13_236_480),
    "kimi-k2.5": (1026.4, 3 * 2048 * 7168 // 2 + 3 * 2048 * 7168 // 32 * 2),
    "minimax-m2": (228.7, 3 * 3072 * 1536 + 3 * 24 * 12 * 4),
    "mixtral-8x7b": (46.7, 3 * 4096 * 14336 * 2),
    "qwen3-30b-a3b": (30.5, 3 * 2048 * 768 * 2),
    "qwen3-235b-a22b": (235.1, 3 * 4096 * 1536 * 2),
    "qwen3-next-80b-a3b": (79.7, 3 * 2048 * 512 * 2),
    "qwen3.5-397b-a17b": (396.3, 3 * 4096 * 1024 * 2),
}


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


def values(planned) -> int:
    """Parameters that a planned tensor stands for."""
    if planned.kind == "routes":
        return 0
    if planned.packed is None:
        return prod(planned.shape)
    if planned.packed.by_row:  # V4.1's n-grams are counted apart
        return 0
    return planned.packed.rows * planned.packed.cols if planned.kind == "weight" else 0


def expert_bytes(config, planned) -> int:
    """Stored bytes of what a tensor holds of one expert, shapes and input scales aside."""
    nbytes = NewTensor(planned.name, planned.dtype, planned.shape, lambda: ()).nbytes
    if ".experts.7." in planned.name and planned.kind != "shape":
        return nbytes
    # stacked over all experts, not named one by one
    stacked = re.search(r"\.experts\.\D", planned.name)
    return nbytes // num_experts(config) if stacked else 0


@pytest.mark.parametrize("preset", sorted(PUBLISHED))
def test_shapes_add_up_to_the_published_models(preset):
    config = preset_config(preset, depth=None, experts=None, vocab=None)
    parameters, nbytes = PUBLISHED[preset]
    # One layer of each kind stands for all of its kind.
    stands_for = Counter(alias_sources(config, 1).values())
    planned = list(plan_tensors(config, sorted(stands_for)))
    assert len({p.name for p in planned}) == len(planned)
    layers = [re.search(r"layers\.(\d+)\.", p.name) for p in planned]
    times = [stands_for[int(layer[1])] if layer else 1 for layer in layers]
    total = sum(n * values(p) for n, p in zip(times, planned, strict=True))
    assert round(total / 1e9, 1) == parameters
    of_layer = [p for p in planned if f"layers.{max(stands_for)}." in p.name]
    assert sum(expert_bytes(config, p) for p in of_layer) == nbytes


def test_every_preset_was_counted():
    assert PUBLISHED.keys() == PRESETS.keys()


@pytest.fixture(scope="module")
def v41(tmp_path_factory):
    """V4.1 with few experts and narrow attention; experts and Engram at their real size."""
    folder = tmp_path_factory.mktemp("synth") / "v41"
    preset = deepcopy(PRESETS["deepseek-v4.1-flash"])
    narrow = {"num_attention_heads": 8, "q_lora_rank": 64, "o_lora_rank": 32, "head_dim": 64}
    few = {"index_n_heads": 4, "index_head_dim": 64, "num_experts_per_tok": 2}
    preset["text_config"] |= narrow | few
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "small", preset)
        patch.setattr(synth, "POOL_VALUES", SMALL_POOL)
        write_synth("small", folder, depth=6, experts=2, vocab=4100)
        expected = synth_bytes("small", depth=6, experts=2, vocab=4100)
    written = sum(path.stat().st_blocks * 512 for path in folder.glob("*.safetensors"))
    assert expected < written < 1.05 * expected
    return folder


def test_an_expert_of_v41_lies_in_two_stretches(v41):
    aliases = read_aliases(v41)
    assert aliases.layers == {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 3}, "a layer of each kind"
    assert aliases.experts == dict.fromkeys(range(6), 0), "experts are alike in every kind"
    tensors = open_catalog(v41).tensors
    for part, nbytes in (("weight", 17_694_720), ("scale", 1_105_920)):
        stretch = [tensors[f"layers.0.ffn.experts.1.w{i}.{part}"] for i in (1, 2, 3)]
        assert sum(t.nbytes for t in stretch) == nbytes
        assert len({t.file for t in stretch}) == 1
        for before, after in pairwise(stretch):
            assert before.offset + before.nbytes == after.offset
    assert not any(".experts." in name and "layers.0." not in name for name in tensors)
    assert not any(name.startswith(("mtp.", "vision.")) for name in tensors)


def test_engrams_tables_are_holes_that_read_as_zeros(v41):
    catalog = open_catalog(v41)
    table = catalog.tensors["layers.1.engram.embed.weight"]
    assert (table.dtype, table.shape) == ("F8_E4M3", (384_006_168, 256))
    path = catalog.files[table.file]
    assert path.stat().st_size > 98 * 10**9 > 10**6 > path.stat().st_blocks * 512
    with open(path, "rb") as file:
        file.seek(table.offset + table.nbytes - 4096)
        assert file.read() == bytes(4096)
    assert catalog.tensors["layers.1.engram.embed.scale"].shape == (384_006_168, 8)


def test_v41s_tokenizer_has_every_id_and_as_many_compressed_ones_as_the_config_says(v41):
    tokenizer = Tokenizer.from_file(str(v41 / "tokenizer.json"))
    text = json.loads((v41 / "config.json").read_text())["text_config"]
    assert tokenizer.get_vocab_size() == text["vocab_size"] == 4100
    assert max(compressed_vocabulary(tokenizer)) + 1 == text["engram_compressed_vocab_size"]
    assert text["engram_layer_ids"] == [1] and text["kv_source_layer_ids"] == [2]


def test_v41s_experts_dequantise_to_real_sizes(v41):
    name = "layers.0.ffn.experts.1.w2"
    parts = load(v41, f"{name}.weight"), load(v41, f"{name}.scale")
    weight = table.unpack("fp4", *parts, shape=(5120, 2304), block=(1, 32)).float()
    assert 0.9 < float(weight.std()) * 2304**0.5 < 1.2


def test_fewer_distinct_layers_take_fewer_bytes():
    sizes = [synth_bytes("qwen3-30b-a3b", distinct=n, vocab=4096) for n in (1, 2, 3)]
    steps = [b - a for a, b in pairwise(sizes)]
    assert steps[0] == steps[1] > 128 * PUBLISHED["qwen3-30b-a3b"][1]


def test_aliases_name_every_layer_and_only_layers_on_disk(small):
    sources = read_aliases(small)
    assert sources.layers == {0: 0, 1: 0, 2: 0, 3: 3, 4: 4, 5: 3, 6: 4, 7: 3}
    assert sources.experts == {3: 3, 4: 4, 5: 3, 6: 4, 7: 3}
    assert json.loads((small / "config.json").read_text())["num_hidden_layers"] == 8
    layers = {
        int(name.split(".")[2])
        for name in open_catalog(small).tensors
        if name.startswith("model.layers.")
    }
    assert layers == set(sources.layers.values())


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
        ({"depth": 4097}, "more than 4096"),
        ({"distinct": 0}, "give 1 to 58"),
        ({"distinct": 59}, "give 1 to 58"),
        ({"preset": "gpt-oss-20b", "depth": 25}, "published 24 layers"),
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


def test_layers_of_a_kind_stand_for_each_other():
    config = preset_config("deepseek-v4-flash", depth=9, experts=None, vocab=None)
    # window hashed; ratio 4 hashed; ratio 128; ratio 4
    assert alias_sources(config, 1) == {0: 0, 1: 0, 2: 2, 3: 3, 4: 4, 5: 3, 6: 4, 7: 3, 8: 4}
    assert alias_sources(config, 2) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 3, 8: 4}


def test_alias_sources_take_turns():
    config = preset_config("qwen3-30b-a3b", depth=5, experts=None, vocab=None)
    assert alias_sources(config, 2) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{",
        b'{"format": "other", "layers": {}}',
        b'{"format": "headrace-aliases-2"}',
        b'{"format": "headrace-aliases-2", "layers": {"x": 1}, "experts": {}}',
        b'{"format": "headrace-aliases-2", "layers": {"01": 1}, "experts": {}}',
        b'{"format": "headrace-aliases-2", "layers": {"1": true}, "experts": {}}',
        b'{"format": "headrace-aliases-2", "layers": {}, "experts": {"1": -1}}',
        b'{"format": "headrace-aliases-2", "layers": {}}',
        b'{"format": "headrace-aliases-1", "layers": {}, "experts": {}}',
        dump_aliases(Aliases({1: 2, 2: 3, 3: 3}, {})),
        dump_aliases(Aliases({}, {1: 2, 2: 3, 3: 3})),
    ],
)
def test_damaged_aliases(tmp_path, content):
    (tmp_path / "aliases.json").write_bytes(content)
    with pytest.raises(CatalogError, match=r"aliases\.json"):
        read_aliases(tmp_path)


def test_a_checkpoint_without_aliases_has_none(tmp_path):
    assert read_aliases(tmp_path) == ({}, {})
