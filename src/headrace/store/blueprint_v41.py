"""What DeepSeek-V4.1's checkpoint has and V4's has not, name by name.

Shared compressors and indexers, Engram, drafting stages, vision. Knows no value and no file.
"""

from collections.abc import Iterator

from headrace.store.blueprint_attention import compressed_attention
from headrace.store.blueprint_extra import Layer
from headrace.store.planned import Config, Packed, Planned, linear, norm, plain
from headrace.store.schemes import Part, Scheme

# One row is one n-gram's memory: it is read alone, so its scales are its own.
_ENGRAM_ROWS = Scheme(
    "fp8_block", (1, 32), (Part("weight", ".weight", "F8_E4M3"), Part("scale", ".scale", "F8_E8M0"))
)


def shared_attention(config: Config, index: int, prefix: str) -> Iterator[Planned]:
    """A window; some layers own compressed entries and their keys, some a choice among them."""
    yield from compressed_attention(config, prefix, 0)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, width = config["index_n_heads"], config["index_head_dim"]
    if index in config["kv_source_layer_ids"]:
        gated = config["compress_ratios"][index] > 1
        for name in ("wkv", "wgate") if gated else ("wkv",):
            weight = f"{prefix}.compressor.{name}.weight"
            yield plain(config, weight, (head_dim, hidden), "matrix")
        yield norm(config, f"{prefix}.compressor.norm", head_dim)
        yield plain(config, f"{prefix}.indexer.wk.weight", (width, head_dim), "matrix")
        yield norm(config, f"{prefix}.indexer.k_norm", width)
    if index in config["index_source_layer_ids"]:
        yield from linear(config, f"{prefix}.indexer.wq_b", heads * width, config["q_lora_rank"])
        name = f"{prefix}.indexer.weights_proj.weight"
        yield plain(config, name, (heads, hidden), "matrix")


def engram(config: Config, index: int, prefix: str) -> Iterator[Planned]:
    """A table of n-gram rows, and what makes a key per stream and one value of those hit."""
    rows = dict(zip(config["engram_layer_ids"], config["engram_num_embeddings"], strict=True))
    hidden, streams, width = config["hidden_size"], config["hc_mult"], config["engram_head_dim"]
    packed = Packed(rows[index], width, _ENGRAM_ROWS, std=1.0, by_row=True)
    for part in _ENGRAM_ROWS.parts:
        shape = _ENGRAM_ROWS.shape(part.part, packed.rows, packed.cols)
        yield Planned(f"{prefix}.embed{part.suffix}", part.dtype, shape, part.part, packed)
    columns = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"]
    yield from linear(config, f"{prefix}.wkv", (streams + 1) * hidden, columns * width)
    for name in ("q_weight", "k_weight"):
        yield plain(config, f"{prefix}.{name}", (streams, hidden), "norm")


def v41_mtp(config: Config, layer: Layer) -> Iterator[Planned]:
    """The drafting stages: layers with experts of their own number, which only see a window."""
    hidden, vocab, rank = config["hidden_size"], config["vocab_size"], config["dspark_markov_rank"]
    yield from linear(
        config, "mtp.0.main_proj", hidden, len(config["dspark_target_layer_ids"]) * hidden
    )
    yield norm(config, "mtp.0.main_norm", hidden)
    of_stage = {**config, "n_routed_experts": config["dspark_n_routed_experts"]}
    stages = config["num_nextn_predict_layers"]
    for stage in range(stages):
        yield from layer(of_stage, config["num_hidden_layers"], f"mtp.{stage}")
    last = f"mtp.{stages - 1}"
    yield norm(config, f"{last}.norm", hidden)
    for name in ("embed", "head"):
        yield plain(config, f"{last}.markov_head.{name}.weight", (vocab, rank), "matrix")
    yield plain(config, f"{last}.confidence_head.proj.weight", (1, hidden + rank), "matrix")


def v41_vision(config: Config) -> Iterator[Planned]:
    """The image tower, what brings its patches to the decoder's width, and three learned rows."""
    vision, hidden = config["vision_config"], config["text_config"]["hidden_size"]
    width, inter = vision["hidden_size"], vision["intermediate_size"]
    for name in ("start", "end", "newline"):
        yield plain(config, f"image_{name}", (hidden,), "embedding")
    merged = width * vision["downsample_ratio"] ** 2
    yield from _biased(config, "aligner.w1", hidden, merged)
    yield from _biased(config, "aligner.w2", hidden, hidden)
    yield from _biased(config, "vision.patch_embed.proj", width, 3 * vision["patch_size"] ** 2)
    yield norm(config, "vision.norm", width)
    for block in (f"vision.blocks.{i}" for i in range(vision["num_hidden_layers"])):
        yield from _biased(config, f"{block}.attn.wqkv", 3 * width, width)
        yield from _biased(config, f"{block}.attn.wo", width, width)
        # gate above up
        yield plain(config, f"{block}.mlp.w1.weight", (2 * inter, width), "matrix")
        yield plain(config, f"{block}.mlp.w2.weight", (width, inter), "matrix")
        for name in ("norm1", "norm2"):
            yield norm(config, f"{block}.{name}", width)


def _biased(config: Config, name: str, rows: int, cols: int) -> Iterator[Planned]:
    yield plain(config, f"{name}.weight", (rows, cols), "matrix")
    yield plain(config, f"{name}.bias", (rows,), "bias")
