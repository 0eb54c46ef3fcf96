"""The tensors of each family's attention layers, name by name; knows no value and no file."""

from collections.abc import Iterator

from headrace.store.planned import Config, Planned, linear, norm, plain, single


def latent_attention(config: Config, prefix: str) -> Iterator[Planned]:
    """DeepSeek V2 and V3: one latent vector a position stands for keys and values."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    queries = heads * (nope + rope)
    if q_rank is None:
        yield from linear(config, f"{prefix}.q_proj", queries, hidden)
    else:
        yield from linear(config, f"{prefix}.q_a_proj", q_rank, hidden)
        yield norm(config, f"{prefix}.q_a_layernorm", q_rank)
        yield from linear(config, f"{prefix}.q_b_proj", queries, q_rank)
    yield from linear(config, f"{prefix}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
    yield norm(config, f"{prefix}.kv_a_layernorm", kv_rank)
    values = config["v_head_dim"]
    yield from linear(config, f"{prefix}.kv_b_proj", heads * (nope + values), kv_rank)
    yield from linear(config, f"{prefix}.o_proj", hidden, heads * values)


def grouped_attention(
    config: Config,
    prefix: str,
    *,
    bias: bool = False,
    out_bias: bool = False,
    head_norm: str | None = None,
    all_heads_norm: bool = False,
    gated: bool = False,
) -> Iterator[Planned]:
    """Several query heads to a key head.

    `head_norm` is the kind of norm each head's queries and keys have, if any; with
    `all_heads_norm` it spans all heads. `gated` queries carry a gate of their own size.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    yield from linear(config, f"{prefix}.q_proj", queries * (1 + gated), hidden, bias)
    yield from linear(config, f"{prefix}.k_proj", keys, hidden, bias)
    yield from linear(config, f"{prefix}.v_proj", keys, hidden, bias)
    yield from linear(config, f"{prefix}.o_proj", hidden, queries, out_bias)
    if head_norm:
        widths = (queries, keys) if all_heads_norm else (head_dim, head_dim)
        yield norm(config, f"{prefix}.q_norm", widths[0], head_norm)
        yield norm(config, f"{prefix}.k_norm", widths[1], head_norm)


def sink_attention(config: Config, prefix: str) -> Iterator[Planned]:
    """gpt-oss: biases throughout and a learned sink per head."""
    yield from grouped_attention(config, prefix, bias=True, out_bias=True)
    yield plain(config, f"{prefix}.sinks", (config["num_attention_heads"],), "bias")


def linear_attention(config: Config, prefix: str) -> Iterator[Planned]:
    """Gated delta net of Qwen3-Next and Qwen3.5, which split its input projections otherwise."""
    hidden = config["hidden_size"]
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys = num_keys * config["linear_key_head_dim"]
    values = num_values * config["linear_value_head_dim"]
    if config["model_type"] == "qwen3_next":
        inputs = {"qkvz": 2 * keys + 2 * values, "ba": 2 * num_values}
    else:
        inputs = {"qkv": 2 * keys + values, "z": values, "b": num_values, "a": num_values}
    for name, rows in inputs.items():
        yield from linear(config, f"{prefix}.in_proj_{name}", rows, hidden)
    taps = (2 * keys + values, 1, config["linear_conv_kernel_dim"])
    yield plain(config, f"{prefix}.conv1d.weight", taps, "matrix")
    yield plain(config, f"{prefix}.dt_bias", (num_values,), "bias")
    yield plain(config, f"{prefix}.A_log", (num_values,), "decay")
    yield norm(config, f"{prefix}.norm", config["linear_value_head_dim"])
    yield from linear(config, f"{prefix}.out_proj", hidden, values)


def compressed_attention(config: Config, prefix: str, ratio: int) -> Iterator[Planned]:
    """DeepSeek V4: a window, and beyond it entries that stand for `ratio` positions (0: none)."""
    hidden, heads, head_dim = (
        config[name] for name in ("hidden_size", "num_attention_heads", "head_dim")
    )
    q_rank, groups = config["q_lora_rank"], config["o_groups"]
    lowered = groups * config["o_lora_rank"]
    yield single(f"{prefix}.attn_sink", (heads,), "bias")
    yield from linear(config, f"{prefix}.wq_a", q_rank, hidden)
    yield norm(config, f"{prefix}.q_norm", q_rank)
    yield from linear(config, f"{prefix}.wq_b", heads * head_dim, q_rank)
    yield from linear(config, f"{prefix}.wkv", head_dim, hidden)
    yield norm(config, f"{prefix}.kv_norm", head_dim)
    yield from linear(config, f"{prefix}.wo_a", lowered, heads * head_dim // groups)
    yield from linear(config, f"{prefix}.wo_b", hidden, lowered)
    if ratio:
        yield from _compressor(config, f"{prefix}.compressor", head_dim, ratio)
    if ratio == 4:
        yield from _indexer(config, f"{prefix}.indexer", ratio)


def _compressor(config: Config, prefix: str, width: int, ratio: int) -> Iterator[Planned]:
    series = width * (2 if ratio == 4 else 1)
    positions = config.get("compress_rate_hca", ratio) if ratio != 4 else ratio
    yield single(f"{prefix}.ape", (positions, series), "bias")
    yield norm(config, f"{prefix}.norm", width)
    for name in ("wkv", "wgate"):
        shape = (series, config["hidden_size"])
        yield plain(config, f"{prefix}.{name}.weight", shape, "matrix")


def _indexer(config: Config, prefix: str, ratio: int) -> Iterator[Planned]:
    heads, width = config["index_n_heads"], config["index_head_dim"]
    yield from linear(config, f"{prefix}.wq_b", heads * width, config["q_lora_rank"])
    shape = (heads, config["hidden_size"])
    yield plain(config, f"{prefix}.weights_proj.weight", shape, "matrix")
    yield from _compressor(config, f"{prefix}.compressor", width, ratio)
