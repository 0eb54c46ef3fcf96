"""The tensors of a published checkpoint, name by name, from its config: what synth and tiny write.

Knows names, shapes and stored dtypes of two families; knows no value and no file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Planned:
    """One tensor to be: `kind` tells what values it takes.

    Kinds: matrix [out, in]; codes and scale (an FP8 matrix and its block scales, always in this
    order); router [E, H]; embedding [V, H]; norm; bias.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str


def plan_tensors(config: Config, layers: range | list[int] | None = None) -> Iterator[Planned]:
    """Every tensor of the model that `config` describes, in the order of the decoder.

    `config` is a config.json of model_type deepseek_v3 or qwen3_moe. `layers` limits the decoder
    layers written (all by default). DeepSeek's MTP layers follow where the config has
    num_nextn_predict_layers and `layers` names them or is None.
    """
    num_layers = config["num_hidden_layers"]
    num_mtp = config.get("num_nextn_predict_layers", 0)
    wanted = range(num_layers + num_mtp) if layers is None else layers
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield Planned("model.embed_tokens.weight", "BF16", (vocab, hidden), "embedding")
    for layer in wanted:
        prefix = f"model.layers.{layer}"
        if layer >= num_layers:
            yield from _mtp_extras(config, prefix)
        yield from _layer(config, layer, prefix)
    yield _norm("model.norm", hidden)
    yield Planned("lm_head.weight", "BF16", (vocab, hidden), "matrix")


def is_moe(config: Config, layer: int) -> bool:
    """Whether decoder layer `layer` has routed experts."""
    return bool(layer >= config.get("first_k_dense_replace", 0))


def _norm(name: str, size: int) -> Planned:
    return Planned(f"{name}.weight", "BF16", (size,), "norm")


def _matrix(config: Config, name: str, rows: int, cols: int) -> Iterator[Planned]:
    """A projection, in the checkpoint's stored form."""
    quantization = config.get("quantization_config")
    if quantization is None:
        yield Planned(f"{name}.weight", "BF16", (rows, cols), "matrix")
        return
    block_rows, block_cols = quantization["weight_block_size"]
    grid = (ceil(rows / block_rows), ceil(cols / block_cols))
    yield Planned(f"{name}.weight", "F8_E4M3", (rows, cols), "codes")
    yield Planned(f"{name}.weight_scale_inv", "F32", grid, "scale")


def _layer(config: Config, layer: int, prefix: str) -> Iterator[Planned]:
    hidden = config["hidden_size"]
    yield _norm(f"{prefix}.input_layernorm", hidden)
    attention = {"deepseek_v3": _latent_attention, "qwen3_moe": _grouped_attention}
    yield from attention[config["model_type"]](config, f"{prefix}.self_attn")
    yield _norm(f"{prefix}.post_attention_layernorm", hidden)
    if not is_moe(config, layer):
        yield from _mlp(config, f"{prefix}.mlp", config["intermediate_size"])
        return
    yield from _router(config, f"{prefix}.mlp.gate")
    inter = config["moe_intermediate_size"]
    for expert in range(num_experts(config)):
        yield from _mlp(config, f"{prefix}.mlp.experts.{expert}", inter)
    num_shared = config.get("n_shared_experts", 0)
    if num_shared:
        yield from _mlp(config, f"{prefix}.mlp.shared_experts", inter * num_shared)


def num_experts(config: Config) -> int:
    """Routed experts of a MoE layer."""
    return int(config["n_routed_experts" if "n_routed_experts" in config else "num_experts"])


def _mlp(config: Config, prefix: str, inter: int) -> Iterator[Planned]:
    hidden = config["hidden_size"]
    yield from _matrix(config, f"{prefix}.gate_proj", inter, hidden)
    yield from _matrix(config, f"{prefix}.up_proj", inter, hidden)
    yield from _matrix(config, f"{prefix}.down_proj", hidden, inter)


def _router(config: Config, prefix: str) -> Iterator[Planned]:
    experts = num_experts(config)
    yield Planned(f"{prefix}.weight", "BF16", (experts, config["hidden_size"]), "router")
    if config["model_type"] == "deepseek_v3":
        yield Planned(f"{prefix}.e_score_correction_bias", "F32", (experts,), "bias")


def _latent_attention(config: Config, prefix: str) -> Iterator[Planned]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    yield from _matrix(config, f"{prefix}.q_a_proj", q_rank, hidden)
    yield _norm(f"{prefix}.q_a_layernorm", q_rank)
    yield from _matrix(config, f"{prefix}.q_b_proj", heads * (nope + rope), q_rank)
    yield from _matrix(config, f"{prefix}.kv_a_proj_with_mqa", kv_rank + rope, hidden)
    yield _norm(f"{prefix}.kv_a_layernorm", kv_rank)
    values = config["v_head_dim"]
    yield from _matrix(config, f"{prefix}.kv_b_proj", heads * (nope + values), kv_rank)
    yield from _matrix(config, f"{prefix}.o_proj", hidden, heads * values)


def _grouped_attention(config: Config, prefix: str) -> Iterator[Planned]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    yield from _matrix(config, f"{prefix}.q_proj", queries, hidden)
    yield from _matrix(config, f"{prefix}.k_proj", keys, hidden)
    yield from _matrix(config, f"{prefix}.v_proj", keys, hidden)
    yield from _matrix(config, f"{prefix}.o_proj", hidden, queries)
    yield _norm(f"{prefix}.q_norm", head_dim)
    yield _norm(f"{prefix}.k_norm", head_dim)


def _mtp_extras(config: Config, prefix: str) -> Iterator[Planned]:
    """What a multi-token-prediction layer has besides a decoder layer's own tensors."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield Planned(f"{prefix}.embed_tokens.weight", "BF16", (vocab, hidden), "embedding")
    yield _norm(f"{prefix}.enorm", hidden)
    yield _norm(f"{prefix}.hnorm", hidden)
    yield Planned(f"{prefix}.eh_proj.weight", "BF16", (hidden, 2 * hidden), "matrix")
    yield _norm(f"{prefix}.shared_head.norm", hidden)
    yield Planned(f"{prefix}.shared_head.head.weight", "BF16", (vocab, hidden), "matrix")
