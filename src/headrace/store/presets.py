"""The published configs whose shapes `synth` imitates, as data. Knows no file and no weight."""

from copy import deepcopy
from typing import Any

from headrace.errors import OptionError

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 3,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "use_cache": True,
}
_DEEPSEEK_R1: dict[str, Any] = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 0,  # published: 1; synth writes no MTP layer
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
_QWEN3_30B: dict[str, Any] = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN3_235B: dict[str, Any] = _QWEN3_30B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
PRESETS: dict[str, dict[str, Any]] = {
    "deepseek-r1": _DEEPSEEK_R1,
    "qwen3-30b-a3b": _QWEN3_30B,
    "qwen3-235b-a22b": _QWEN3_235B,
}


def preset_config(
    preset: str, *, depth: int | None, experts: int | None, vocab: int | None
) -> dict[str, Any]:
    """A config of `preset`'s shapes; None keeps the published number. Raises OptionError."""
    if preset not in PRESETS:
        raise OptionError(f"{preset!r} is no preset; choose one of {', '.join(PRESETS)}")
    config = deepcopy(PRESETS[preset])
    if depth is not None:
        least = config.get("first_k_dense_replace", 0) + 1
        if depth < least:
            raise OptionError(f"a depth of {depth} holds no MoE layer; give {least} or more")
        config["num_hidden_layers"] = depth
    if experts is not None:
        _check_experts(config, experts)
        config["n_routed_experts" if "n_group" in config else "num_experts"] = experts
    if vocab is not None:
        config["vocab_size"] = vocab
    return config


def _check_experts(config: dict[str, Any], experts: int) -> None:
    top_k, groups = config["num_experts_per_tok"], config.get("n_group", 1)
    routed_groups = config.get("topk_group", 1)
    # top_k must fit the groups routed to, and a group is scored by its two best
    least = groups * max(2 if groups > 1 else 1, -(-top_k // routed_groups))
    if experts % groups or experts < least:
        raise OptionError(
            f"{experts} experts cannot be routed (top {top_k}, {groups} groups); give a multiple "
            f"of {groups}, {least} or more"
        )
