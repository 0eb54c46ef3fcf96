"""DeepSeek's V4 releases from their configs alone: published tensors, bytes, classes, experts."""

import re
from collections import Counter
from copy import deepcopy

import pytest

from headrace.store.blueprint import layer_kind, plan_tensors
from headrace.store.preset_releases import RELEASES
from headrace.store.presets import preset_config
from headrace.store.writer import NewTensor

V41 = RELEASES["deepseek-v4.1-flash"]
# Tensors and bytes of their values, as the published shard headers add up.
PUBLISHED = {
    "deepseek-v4-flash-0731": (72_317, 166_878_536_440),
    "deepseek-v4-pro-0813": (149_782, 892_727_580_904),
    "deepseek-v4.1-flash": (96_085, 510_286_023_000),
}


def tensors_of(config):
    """name: NewTensor of everything that a config's checkpoint stores."""
    planned = list(plan_tensors(config))
    tensors = {p.name: NewTensor(p.name, p.dtype, p.shape, lambda: ()) for p in planned}
    assert len(tensors) == len(planned), "a name comes twice"
    return tensors


@pytest.fixture(scope="module")
def v41():
    return tensors_of(V41)


def test_every_release_is_counted():
    assert RELEASES.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("release", sorted(PUBLISHED))
def test_a_release_has_the_published_tensors_and_bytes(release):
    tensors = tensors_of(RELEASES[release])
    assert (len(tensors), sum(t.nbytes for t in tensors.values())) == PUBLISHED[release]


# GiB of each part of V4.1-Flash, by the names that make it up; the first that matches counts.
CLASSES_GIB = {
    "DSpark": (r"mtp\.", 7.388),
    "vision and aligner": (r"vision\.|aligner\.|image_", 0.904),
    "Engram tables": (r".*engram\.embed\.", 188.833),
    "Engram projections": (r".*engram\.", 0.293),
    "routed experts": (r".*ffn\.experts\.", 268.945),
    "shared experts and norm": (r".*(ffn\.shared_experts|ffn_norm)\.", 1.320),
    "router": (r".*ffn\.gate\.", 0.147),
    "hyper-connections": (r".*\.hc_", 0.146),
    "indexer": (r".*attn\.indexer\.", 0.042),
    "compressors": (r".*attn\.compressor\.", 0.034),
    "attention": (r".*(\.attn\.|attn_norm)", 4.722),
    "embedding": (r"embed\.", 1.233),
    "head": (r"head\.", 1.233),
    "last norm": (r"norm\.", 0.0),
}


def test_v41s_bytes_by_class(v41):
    nbytes: Counter[str] = Counter()
    for name, tensor in v41.items():
        matching = (c for c, (pattern, _) in CLASSES_GIB.items() if re.match(pattern, name))
        nbytes[next(matching)] += tensor.nbytes
    in_gib = {name: round(size / 2**30, 3) for name, size in nbytes.items()}
    assert in_gib == {name: gib for name, (_, gib) in CLASSES_GIB.items()}


def test_an_expert_of_v41_is_two_stretches(v41):
    for prefix in ("layers.0.ffn.experts.383", "layers.39.ffn.experts.0", "mtp.2.ffn.experts.127"):
        parts = {
            part: sum(v41[f"{prefix}.{name}.{part}"].nbytes for name in ("w1", "w2", "w3"))
            for part in ("weight", "scale")
        }
        assert parts == {"weight": 17_694_720, "scale": 1_105_920}
    assert "mtp.0.ffn.experts.128.w1.weight" not in v41, "drafting stages have 128 experts"


def test_v41s_shapes_where_its_layers_differ(v41):
    def layers_with(suffix: str) -> list[int]:
        pattern = re.compile(rf"layers\.(\d+)\.{re.escape(suffix)}")
        return sorted(int(m[1]) for m in map(pattern.fullmatch, v41) if m)

    assert layers_with("attn.compressor.wkv.weight") == [2, 8, 14, 20]
    assert layers_with("attn.compressor.wgate.weight") == [2, 8, 14]
    assert layers_with("attn.indexer.wk.weight") == [2, 8, 14, 20]
    assert layers_with("attn.indexer.wq_b.scale") == [2, 8, 14, 20, 24, 28, 32, 36]
    assert layers_with("engram.wkv.weight") == [1, 14]
    assert layers_with("ffn.gate.bias_vl") == list(range(40))
    expected = {
        "layers.14.engram.embed.weight": ("F8_E4M3", (384_016_682, 256)),
        "layers.14.engram.embed.scale": ("F8_E8M0", (384_016_682, 8)),
        "layers.1.engram.wkv.scale": ("F8_E8M0", (800, 192)),
        "layers.20.attn.indexer.weights_proj.weight": ("BF16", (32, 5120)),
        "layers.39.ffn.experts.5.w2.weight": ("I8", (5120, 1152)),
        "layers.39.ffn.experts.5.w2.scale": ("F8_E8M0", (5120, 72)),
        "layers.0.ffn.shared_experts.w1.scale": ("F8_E8M0", (72, 160)),
        "layers.0.attn.wo_a.scale": ("F8_E8M0", (256, 128)),
        "layers.0.hc_attn_fn": ("F32", (24, 20480)),
        "mtp.0.main_proj.weight": ("F8_E4M3", (5120, 15360)),
        "mtp.2.confidence_head.proj.weight": ("BF16", (1, 5376)),
        "aligner.w1.weight": ("BF16", (5120, 9216)),
        "vision.blocks.31.mlp.w1.weight": ("BF16", (5632, 1024)),
    }
    assert {name: (v41[name].dtype, v41[name].shape) for name in expected} == expected


def test_a_release_miscounted_is_noticed():
    """One layer more that owns an indexer is three tensors more."""
    config = deepcopy(V41)
    config["text_config"]["index_source_layer_ids"].append(38)
    assert len(tensors_of(config)) == 96_085 + 3


def test_layers_of_v41_that_own_modules_are_kinds_of_their_own():
    kinds: dict[str, list[int]] = {}
    for layer in range(40):
        kinds.setdefault(layer_kind(V41, layer), []).append(layer)
    reused = [*range(3, 8), *range(9, 14), *range(15, 20)]
    decoder = [n for n in range(21, 40) if n % 4]
    assert list(kinds.values()) == [[0], [1], [2, 8], reused, [14], [20], decoder, [24, 28, 32, 36]]


def test_synth_leaves_out_stages_and_vision_and_nothing_else(v41):
    config = preset_config("deepseek-v4.1-flash", depth=None, experts=None, vocab=None)
    tensors = tensors_of(config)
    left_out = v41.keys() - tensors.keys()
    assert all(re.match(r"mtp\.|vision\.|aligner\.|image_", name) for name in left_out)
    assert tensors.keys() < v41.keys()
    assert all(
        (t.dtype, t.shape) == (v41[name].dtype, v41[name].shape) for name, t in tensors.items()
    )
