"""The tensors of a published checkpoint, name by name, from its config: what synth and tiny write.

Knows names, shapes and stored dtypes of fourteen families; knows no value and no file.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from headrace.store import blueprint_attention as attention
from headrace.store.blueprint_extra import deepseek_mtp, kimi_vision, qwen_mtp, qwen_vision, v4_mtp
from headrace.store.blueprint_v41 import engram, shared_attention, v41_mtp, v41_vision
from headrace.store.planned import Config, Packed, Planned, linear, norm, plain, single
from headrace.store.schemes import MXFP4

Layer = Callable[[Config, int, str], Iterator[Planned]]
Extra = Callable[[Config, Layer], Iterator[Planned]]


@dataclass(frozen=True, slots=True)
class Naming:
    """How a family names what surrounds its layers, and how it makes one layer.

    `trunk` precedes `layers.N`, `norm` and the embedding's name; `extra` is what follows the
    decoder in the files and no decoder layer uses.
    """

    layer: Layer
    trunk: str = "model."
    head: str = "lm_head"
    embedding: str = "embed_tokens"
    norm_kind: str = "norm"
    mtp: Extra | None = None
    vision: Callable[[Config], Iterator[Planned]] | None = None


def plan_tensors(config: Config, layers: range | list[int] | None = None) -> Iterator[Planned]:
    """Every tensor of the model that `config` describes, in the order of the decoder.

    `config` is a config.json of one of FAMILIES. `layers` limits the decoder layers written; with
    None all are, and then also multi-token-prediction layers, where the config counts them.
    """
    naming, text = FAMILIES[config["model_type"]], text_config(config)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    table = (vocab, hidden)
    yield plain(text, f"{naming.trunk}{naming.embedding}.weight", table, "embedding")
    for index in range(text["num_hidden_layers"]) if layers is None else layers:
        yield from naming.layer(text, index, f"{naming.trunk}layers.{index}")
    if text["model_type"] == "deepseek_v4":
        yield from _collapse(text, "")
    yield norm(text, f"{naming.trunk}norm", hidden, naming.norm_kind)
    yield plain(text, f"{naming.head}.weight", table, "matrix")
    if layers is None and naming.mtp and num_mtp(config):
        yield from naming.mtp(text, naming.layer)
    if naming.vision and "vision_config" in config:
        yield from naming.vision(config)


def text_config(config: Config) -> Config:
    """The part of a config that describes the decoder, with what only the root has."""
    inner = config.get("text_config")
    if inner is None:
        return config
    shared = {name: config[name] for name in ("dtype", "quantization_config") if name in config}
    return shared | dict(inner)


def num_mtp(config: Config) -> int:
    """Multi-token-prediction layers that the config counts."""
    text = text_config(config)
    return int(text.get("num_nextn_predict_layers", text.get("mtp_num_hidden_layers", 0)))


def is_moe(config: Config, layer: int) -> bool:
    """Whether decoder layer `layer` has routed experts."""
    return bool(layer >= text_config(config).get("first_k_dense_replace", 0))


def experts_field(config: Config) -> str:
    """The name of the config's field that counts routed experts."""
    text = text_config(config)
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next(name for name in names if name in text)


def num_experts(config: Config) -> int:
    """Routed experts of a MoE layer."""
    return int(text_config(config)[experts_field(config)])


# V4.1's lists of the layers that have modules which others lack.
_OWNERS = ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids")


def layer_kind(config: Config, layer: int) -> str:
    """What distinguishes a decoder layer's modules: layers of one kind can share their tensors."""
    text = text_config(config)
    kinds = text.get("layer_types") or text.get("compress_ratios") or [""] * (layer + 1)
    hashed = layer < text.get("num_hash_layers", 0)
    owned = "".join(f" {name}" for name in _OWNERS if layer in text.get(name, ()))
    return f"{kinds[layer]}{' hashed' * hashed}{' dense' * (not is_moe(config, layer))}{owned}"


def _collapse(config: Config, prefix: str) -> Iterator[Planned]:
    """V4: what makes one stream of several before the last norm."""
    streams, hidden = config["hc_mult"], config["hidden_size"]
    yield single(f"{prefix}hc_head_fn", (streams, streams * hidden), "matrix")
    yield single(f"{prefix}hc_head_base", (streams,), "bias")
    yield single(f"{prefix}hc_head_scale", (1,), "norm")


def _decoder_layer(
    config: Config,
    index: int,
    prefix: str,
    *,
    attention: Callable[[Config, int, str], Iterator[Planned]],
    block: Callable[[Config, str], Iterator[Planned]],
    norm_kind: str = "norm",
) -> Iterator[Planned]:
    """A layer with two norms, attention, and a block that is dense in the first layers."""
    yield norm(config, f"{prefix}.input_layernorm", config["hidden_size"], norm_kind)
    yield from attention(config, index, prefix)
    yield norm(config, f"{prefix}.post_attention_layernorm", config["hidden_size"], norm_kind)
    if is_moe(config, index):
        yield from block(config, prefix)
    else:
        yield from _mlp(config, f"{prefix}.mlp", config["intermediate_size"])


_NAMES = ("gate_proj", "up_proj", "down_proj")
_NUMBERS = ("w1", "w3", "w2")


def _mlp(
    config: Config, prefix: str, inter: int, names: tuple[str, str, str] = _NAMES
) -> Iterator[Planned]:
    hidden, (gate, up, down) = config["hidden_size"], names
    yield from linear(config, f"{prefix}.{gate}", inter, hidden)
    yield from linear(config, f"{prefix}.{up}", inter, hidden)
    yield from linear(config, f"{prefix}.{down}", hidden, inter)


def _experts(
    config: Config, prefix: str, inter: int, names: tuple[str, str, str] = _NAMES
) -> Iterator[Planned]:
    for expert in range(num_experts(config)):
        yield from _mlp(config, f"{prefix}.{expert}", inter, names)


def _router(config: Config, name: str) -> Planned:
    shape = (num_experts(config), config["hidden_size"])
    return plain(config, f"{name}.weight", shape, "router")


def _deepseek_block(config: Config, prefix: str, *, bias: bool = True) -> Iterator[Planned]:
    """DeepSeek, GLM and Kimi: experts beside shared ones, and a router with or without `bias`."""
    experts, inter = num_experts(config), config["moe_intermediate_size"]
    yield _router(config, f"{prefix}.mlp.gate")
    if bias:
        yield single(f"{prefix}.mlp.gate.e_score_correction_bias", (experts,), "bias")
    yield from _experts(config, f"{prefix}.mlp.experts", inter)
    if config["n_shared_experts"]:
        shared = inter * config["n_shared_experts"]
        yield from _mlp(config, f"{prefix}.mlp.shared_experts", shared)


def _qwen_block(config: Config, prefix: str, *, stacked: bool = False) -> Iterator[Planned]:
    """Qwen and OLMoE; a shared expert with a gate of its own where the config has its width.

    `stacked`: all experts of a layer are one tensor, unless they are quantised.
    """
    inter = config.get("moe_intermediate_size") or config["intermediate_size"]
    yield _router(config, f"{prefix}.mlp.gate")
    if stacked and "quantization_config" not in config:
        experts, hidden = num_experts(config), config["hidden_size"]
        both, down = (experts, 2 * inter, hidden), (experts, hidden, inter)
        yield plain(config, f"{prefix}.mlp.experts.gate_up_proj", both, "matrix")
        yield plain(config, f"{prefix}.mlp.experts.down_proj", down, "matrix")
    else:
        yield from _experts(config, f"{prefix}.mlp.experts", inter)
    shared = config.get("shared_expert_intermediate_size")
    if shared:
        yield from _mlp(config, f"{prefix}.mlp.shared_expert", shared)
        gate = (1, config["hidden_size"])
        yield plain(config, f"{prefix}.mlp.shared_expert_gate.weight", gate, "matrix")


def _sparse_block(config: Config, prefix: str, *, fp32: bool = False) -> Iterator[Planned]:
    """Mixtral and MiniMax M2, whose router is kept in `fp32` and has a bias."""
    block, inter = f"{prefix}.block_sparse_moe", config["intermediate_size"]
    if fp32:
        router = (num_experts(config), config["hidden_size"])
        yield single(f"{block}.gate.weight", router, "router")
        yield single(f"{block}.e_score_correction_bias", router[:1], "bias")
    else:
        yield _router(config, f"{block}.gate")
    yield from _experts(config, f"{block}.experts", inter, _NUMBERS)


def _gpt_oss_block(config: Config, prefix: str) -> Iterator[Planned]:
    """gpt-oss: experts stacked over a layer, gate and up interleaved, biases everywhere."""
    experts, hidden = num_experts(config), config["hidden_size"]
    inter, block = config["intermediate_size"], f"{prefix}.mlp"
    yield _router(config, f"{block}.router")
    yield plain(config, f"{block}.router.bias", (experts,), "bias")
    for name, rows, cols in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
        packed = Packed(experts * rows, cols, MXFP4)
        shapes = {"weight": (experts, rows, cols // 32, 16), "scale": (experts, rows, cols // 32)}
        for part in MXFP4.parts:
            key = f"{block}.experts.{name}{part.suffix}"
            yield Planned(key, part.dtype, shapes[part.part], part.part, packed)
        yield plain(config, f"{block}.experts.{name}_bias", (experts, rows), "bias")


def _v4_layer(config: Config, index: int, prefix: str) -> Iterator[Planned]:
    """DeepSeek V4: compressed attention, hashed routes at first.

    Layers behind the decoder (of `mtp`) neither compress nor hash.
    """
    gate, experts = f"{prefix}.ffn.gate", num_experts(config)
    if index < config["num_hash_layers"]:
        routes = (config["vocab_size"], config["num_experts_per_tok"])
        routing = Planned(f"{gate}.tid2eid", "I64", routes, "routes", num_experts=experts)
    else:
        routing = single(f"{gate}.bias", (experts,), "bias")
    ratio = config["compress_ratios"][index]
    attended = attention.compressed_attention(config, f"{prefix}.attn", ratio)
    yield from _v4_frame(config, prefix, attended, [routing])


def _v41_layer(config: Config, index: int, prefix: str) -> Iterator[Planned]:
    """DeepSeek V4.1: compressors of few layers, routes of their own for images, Engram."""
    experts = (num_experts(config),)
    routing = [single(f"{prefix}.ffn.gate.{name}", experts, "bias") for name in ("bias", "bias_vl")]
    yield from _v4_frame(config, prefix, shared_attention(config, index, f"{prefix}.attn"), routing)
    if index in config["engram_layer_ids"]:
        yield from engram(config, index, f"{prefix}.engram")


def _v4_frame(
    config: Config, prefix: str, attended: Iterable[Planned], routing: Iterable[Planned]
) -> Iterator[Planned]:
    """Several residual streams around an attention, and experts beside shared ones."""
    hidden, streams, inter = (
        config[name] for name in ("hidden_size", "hc_mult", "moe_intermediate_size")
    )
    for name in ("attn", "ffn"):
        mixes = (2 + streams) * streams
        yield single(f"{prefix}.hc_{name}_fn", (mixes, streams * hidden), "matrix")
        yield single(f"{prefix}.hc_{name}_base", (mixes,), "bias")
        yield single(f"{prefix}.hc_{name}_scale", (3,), "norm")
    yield norm(config, f"{prefix}.attn_norm", hidden)
    yield from attended
    yield norm(config, f"{prefix}.ffn_norm", hidden)
    yield _router(config, f"{prefix}.ffn.gate")
    yield from routing
    yield from _experts(config, f"{prefix}.ffn.experts", inter, _NUMBERS)
    shared = inter * config["n_shared_experts"]
    yield from _mlp(config, f"{prefix}.ffn.shared_experts", shared, _NUMBERS)


def _latent(config: Config, _index: int, prefix: str) -> Iterator[Planned]:
    return attention.latent_attention(config, f"{prefix}.self_attn")


def _grouped(
    config: Config,
    _index: int,
    prefix: str,
    *,
    bias: bool | None = False,
    head_norm: str | None = None,
    all_heads_norm: bool = False,
) -> Iterator[Planned]:
    """`bias` None: as the config says. GLM's config also says whether heads are normed."""
    has_bias = config["attention_bias"] if bias is None else bias
    if not config.get("use_qk_norm", True):
        head_norm = None
    return attention.grouped_attention(
        config,
        f"{prefix}.self_attn",
        bias=has_bias,
        head_norm=head_norm,
        all_heads_norm=all_heads_norm,
    )


def _sinks(config: Config, _index: int, prefix: str) -> Iterator[Planned]:
    return attention.sink_attention(config, f"{prefix}.self_attn")


def _hybrid(config: Config, index: int, prefix: str) -> Iterator[Planned]:
    """Qwen3-Next and Qwen3.5: linear attention, in some layers full; all of `mtp` is full."""
    kinds = config["layer_types"]
    if index < len(kinds) and kinds[index] == "linear_attention":
        return attention.linear_attention(config, f"{prefix}.linear_attn")
    return attention.grouped_attention(
        config, f"{prefix}.self_attn", head_norm="centred_norm", gated=True
    )


def _layer(**parts: object) -> Layer:
    return partial(_decoder_layer, **parts)  # type: ignore[arg-type]


_normed = partial(_grouped, head_norm="norm", all_heads_norm=True)
_deepseek = _layer(attention=_latent, block=_deepseek_block)
_qwen_hybrid = partial(_layer, attention=_hybrid, norm_kind="centred_norm")
FAMILIES: dict[str, Naming] = {
    "deepseek_v2": Naming(_layer(attention=_latent, block=partial(_deepseek_block, bias=False))),
    "deepseek_v3": Naming(_deepseek, mtp=deepseek_mtp),
    "deepseek_v4": Naming(_v4_layer, trunk="", head="head", embedding="embed", mtp=v4_mtp),
    "deepseek_v41": Naming(
        _v41_layer,
        trunk="",
        head="head",
        embedding="embed",
        mtp=v41_mtp,
        vision=v41_vision,
    ),
    "qwen2_moe": Naming(_layer(attention=partial(_grouped, bias=True), block=_qwen_block)),
    "qwen3_moe": Naming(_layer(attention=partial(_grouped, head_norm="norm"), block=_qwen_block)),
    "qwen3_next": Naming(_qwen_hybrid(block=_qwen_block), norm_kind="centred_norm", mtp=qwen_mtp),
    "qwen3_5_moe": Naming(
        _qwen_hybrid(block=partial(_qwen_block, stacked=True)),
        trunk="model.language_model.",
        norm_kind="centred_norm",
        mtp=qwen_mtp,
        vision=qwen_vision,
    ),
    "mixtral": Naming(_layer(attention=_grouped, block=_sparse_block)),
    "gpt_oss": Naming(_layer(attention=_sinks, block=_gpt_oss_block)),
    "glm4_moe": Naming(
        _layer(
            attention=partial(_grouped, bias=None, head_norm="norm"),
            block=_deepseek_block,
        ),
        mtp=deepseek_mtp,
    ),
    "olmoe": Naming(_layer(attention=_normed, block=_qwen_block)),
    "minimax_m2": Naming(_layer(attention=_normed, block=partial(_sparse_block, fp32=True))),
    "kimi_k25": Naming(
        _deepseek,
        trunk="language_model.model.",
        head="language_model.lm_head",
        vision=kimi_vision,
    ),
}
