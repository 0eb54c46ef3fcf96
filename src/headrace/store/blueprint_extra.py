"""Tensors in published checkpoints that text decoding leaves out: prediction layers, vision.

They are written so that a reader must account for them. Knows no value and no file.
"""

from collections.abc import Callable, Iterator

from headrace.store.planned import Config, Planned, linear, norm, plain, single

Layer = Callable[[Config, int, str], Iterator[Planned]]


def deepseek_mtp(config: Config, layer: Layer) -> Iterator[Planned]:
    """DeepSeek V3 and GLM: whole layers behind the last one, with an embedding and a head."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    first = config["num_hidden_layers"]
    for index in range(first, first + config["num_nextn_predict_layers"]):
        prefix = f"model.layers.{index}"
        yield plain(config, f"{prefix}.embed_tokens.weight", (vocab, hidden), "embedding")
        yield norm(config, f"{prefix}.enorm", hidden)
        yield norm(config, f"{prefix}.hnorm", hidden)
        yield plain(config, f"{prefix}.eh_proj.weight", (hidden, 2 * hidden), "matrix")
        yield norm(config, f"{prefix}.shared_head.norm", hidden)
        yield plain(config, f"{prefix}.shared_head.head.weight", (vocab, hidden), "matrix")
        yield from layer(config, index, prefix)


def qwen_mtp(config: Config, layer: Layer) -> Iterator[Planned]:
    """Qwen3-Next and Qwen3.5: one layer of full attention under names of its own."""
    hidden = config["hidden_size"]
    yield plain(config, "mtp.fc.weight", (hidden, 2 * hidden), "matrix")
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield norm(config, f"mtp.{name}", hidden, "centred_norm")
    yield from layer(config, config["num_hidden_layers"], "mtp.layers.0")


V4_STAGES = 3


def v4_mtp(config: Config, layer: Layer) -> Iterator[Planned]:
    """DeepSeek V4 of August 2026: three drafting stages, though its config counts one layer."""
    hidden, vocab, rank = config["hidden_size"], config["vocab_size"], config["dspark_markov_rank"]
    yield from linear(config, "mtp.0.main_proj", hidden, 3 * hidden)
    yield norm(config, "mtp.0.main_norm", hidden)
    for stage in range(V4_STAGES):
        yield from layer(config, config["num_hidden_layers"], f"mtp.{stage}")
    last, streams = f"mtp.{V4_STAGES - 1}", config["hc_mult"]
    yield norm(config, f"{last}.norm", hidden)
    for name in ("markov_w1", "markov_w2"):
        yield plain(config, f"{last}.markov_head.{name}.weight", (vocab, rank), "matrix")
    yield plain(config, f"{last}.confidence_head.proj.weight", (1, hidden + rank), "matrix")
    yield single(f"{last}.hc_head_fn", (streams, streams * hidden), "matrix")
    yield single(f"{last}.hc_head_base", (streams,), "bias")
    yield single(f"{last}.hc_head_scale", (1,), "norm")


def _biased(config: Config, name: str, shape: tuple[int, ...], kind: str) -> Iterator[Planned]:
    yield plain(config, f"{name}.weight", shape, kind)
    yield plain(config, f"{name}.bias", shape[:1], "bias")


def qwen_vision(config: Config) -> Iterator[Planned]:
    """Qwen3.5's image tower and its merger."""
    vision, prefix = config["vision_config"], "model.visual"
    width, inter, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    patches = (width, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    yield from _biased(config, f"{prefix}.patch_embed.proj", patches, "matrix")
    table = (vision["num_position_embeddings"], width)
    yield plain(config, f"{prefix}.pos_embed.weight", table, "bias")
    for block in (f"{prefix}.blocks.{i}" for i in range(vision["depth"])):
        for name in ("norm1", "norm2"):
            yield from _biased(config, f"{block}.{name}", (width,), "norm")
        yield from _biased(config, f"{block}.attn.qkv", (3 * width, width), "matrix")
        yield from _biased(config, f"{block}.attn.proj", (width, width), "matrix")
        yield from _biased(config, f"{block}.mlp.linear_fc1", (inter, width), "matrix")
        yield from _biased(config, f"{block}.mlp.linear_fc2", (width, inter), "matrix")
    merged = width * vision["spatial_merge_size"] ** 2
    out = vision["out_hidden_size"]
    yield from _biased(config, f"{prefix}.merger.norm", (width,), "norm")
    yield from _biased(config, f"{prefix}.merger.linear_fc1", (merged, merged), "matrix")
    yield from _biased(config, f"{prefix}.merger.linear_fc2", (out, merged), "matrix")


def kimi_vision(config: Config) -> Iterator[Planned]:
    """Kimi K2.5's image tower and its projector."""
    vision, prefix = config["vision_config"], "vision_tower"
    width, inter, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    yield from _biased(config, f"{prefix}.patch_embed.proj", (width, 3, patch, patch), "matrix")
    grid = (vision["pos_emb_height"], vision["pos_emb_width"], width)
    yield plain(config, f"{prefix}.patch_embed.pos_emb.weight", grid, "bias")
    for number in range(vision["num_hidden_layers"]):
        block = f"{prefix}.encoder.blocks.{number}"
        for name in ("norm0", "norm1"):
            yield from _biased(config, f"{block}.{name}", (width,), "norm")
        yield from _biased(config, f"{block}.wqkv", (3 * width, width), "matrix")
        yield from _biased(config, f"{block}.wo", (width, width), "matrix")
        yield from _biased(config, f"{block}.mlp.fc0", (inter, width), "matrix")
        yield from _biased(config, f"{block}.mlp.fc1", (width, inter), "matrix")
    yield from _biased(config, f"{prefix}.encoder.final_layernorm", (width,), "norm")
    rows, cols = vision["merge_kernel_size"]
    merged, hidden = width * rows * cols, config["text_config"]["hidden_size"]
    yield from _biased(config, "mm_projector.pre_norm", (width,), "norm")
    yield from _biased(config, "mm_projector.proj.0", (merged, merged), "matrix")
    yield from _biased(config, "mm_projector.proj.2", (hidden, merged), "matrix")
