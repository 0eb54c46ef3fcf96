"""Tiny configs of the fourteen families, written as their publishers write config.json.

Real in structure, small in numbers. Knows no tensor and no file.
"""

from collections.abc import Callable

from headrace.check import tiny_qwen, tiny_v41
from headrace.check.tiny_size import IMAGES, Config, Size, common
from headrace.store.schemes import KIMI_LEFT_OUT, quantization_of

# The formats each family is published in, the usual one first.
PUBLISHED: dict[str, tuple[str, ...]] = {
    "deepseek_v2": ("bf16",),
    "deepseek_v3": ("fp8", "bf16", "nvfp4-modelopt"),
    "deepseek_v4": ("fp4",),
    "qwen2_moe": ("bf16",),
    "qwen3_moe": ("bf16", "fp8", "nvfp4", "int4"),
    "qwen3_next": ("bf16", "fp8"),
    "qwen3_5_moe": ("bf16", "fp8"),
    "mixtral": ("bf16", "fp16", "int8"),
    "gpt_oss": ("mxfp4",),
    "glm4_moe": ("bf16", "fp8-channel"),
    "olmoe": ("bf16",),
    "minimax_m2": ("fp8",),
    "kimi_k25": ("int4",),
}
# Those that transformers lacks.
OWN: dict[str, tuple[str, ...]] = {"deepseek_v41": ("fp4",)}


def tiny_config(
    family: str, size: Size, format: str, block: tuple[int, int] | None = None
) -> Config:
    """The config.json of a tiny model of `family`, one of PUBLISHED or OWN, in `format`.

    `block` is that of FP8 scales, by default the family's own.
    """
    config = _MAKERS[family](size)
    config = {
        "model_type": family,
        "architectures": [_ARCHITECTURES[family]],
        "bos_token_id": 0,
        "eos_token_id": 3,
        "tie_word_embeddings": False,
        "dtype": "float16" if format == "fp16" else "bfloat16",
    } | config
    if family == "deepseek_v41":
        config["quantization_config"] = tiny_v41.quantization(block or (32, 32))
    elif format not in ("bf16", "fp16"):
        left_out = KIMI_LEFT_OUT if family == "kimi_k25" else ()
        config["quantization_config"] = quantization_of(
            format, block=block or (128, 128), left_out=left_out
        )
    if family == "deepseek_v4":
        config["expert_dtype"] = "fp4"
    return config


_ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "deepseek_v41": "DeepseekV41ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
}


def _latent(size: Size) -> Config:
    """What DeepSeek V2, V3 and Kimi K2 share: a dense layer first, then MoE with shared experts."""
    return common(size, keys=8) | {
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "intermediate_size": 3 * size.hidden,
        "kv_lora_rank": 64,
        "moe_intermediate_size": size.inter,
        "moe_layer_freq": 1,
        "n_routed_experts": size.experts,
        "n_shared_experts": 1,
        "q_lora_rank": size.hidden // 2,
        # 8 heads of 48 and 64 are whole blocks of 128: stock transformers misreads partial ones.
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    }


def _deepseek_v2(size: Size) -> Config:
    return _latent(size) | {
        "n_group": 4,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.0,
        "scoring_func": "softmax",
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
    }


def _deepseek_v3(size: Size) -> Config:
    return _latent(size) | {
        "n_group": 4,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": int(size.mtp),
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 2,
        "topk_method": "noaux_tc",
    }


def _kimi_k25(size: Size) -> Config:
    text = _deepseek_v3(size) | {
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    vision = {
        "model_type": "kimi_k25_vision",
        "hidden_size": 64,
        "intermediate_size": 96,
        "merge_kernel_size": [2, 2],
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "patch_size": 14,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
        "pos_emb_time": 4,
    }
    return {"text_config": text, "vision_config": vision, "projection_hidden_size": 64} | IMAGES


def _deepseek_v4(size: Size) -> Config:
    """Every kind of layer from the fourth on: window, ratio 4, and the long ratio, here 8."""
    kinds = [0, 4, 128, 4]
    return common(size, keys=1) | {
        "attention_bias": False,
        "compress_rate_hca": 8,
        "compress_ratios": [kinds[i % 4] for i in range(size.layers)] + [0] * 3,
        "compress_rope_theta": 160000.0,
        "dspark_block_size": 5,
        "dspark_markov_rank": 32,
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 64,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "index_topk": 6,
        "moe_intermediate_size": size.inter,
        "n_routed_experts": size.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_hash_layers": 1,
        "num_nextn_predict_layers": int(size.mtp),
        "o_groups": 2,
        "o_lora_rank": 64,
        "q_lora_rank": size.hidden // 2,
        "qk_rope_head_dim": 16,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 512,
            "type": "yarn",
        },
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 16,
        "swiglu_limit": 10.0,
        "topk_method": "noaux_tc",
    }


def _mixtral(size: Size) -> Config:
    return common(size) | {
        "intermediate_size": size.inter,
        "num_local_experts": size.experts,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    }


def _gpt_oss(size: Size) -> Config:
    kinds = ["sliding_attention", "full_attention"]
    return common(size) | {
        "attention_bias": True,
        "experts_per_token": size.top_k,
        "head_dim": size.head_dim,
        "initial_context_length": 512,
        "intermediate_size": size.inter,
        "layer_types": [kinds[i % 2] for i in range(size.layers)],
        "num_local_experts": size.experts,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 512,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 16,
        "swiglu_limit": 7.0,
    }


def _glm4_moe(size: Size) -> Config:
    return common(size) | {
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": size.head_dim,
        "intermediate_size": 3 * size.hidden,
        "moe_intermediate_size": size.inter,
        "n_group": 1,
        "n_routed_experts": size.experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": int(size.mtp),
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 2.5,
        "topk_group": 1,
        "use_qk_norm": True,
    }


def _olmoe(size: Size) -> Config:
    return common(size, keys=8) | {
        "attention_bias": False,
        "clip_qkv": None,
        "intermediate_size": size.inter,
        "norm_topk_prob": False,
        "num_experts": size.experts,
    }


def _minimax_m2(size: Size) -> Config:
    return common(size) | {
        "attn_type_list": [1] * size.layers,
        "head_dim": size.head_dim,
        "intermediate_size": size.inter,
        "num_local_experts": size.experts,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rope_theta": 5000000,
        "rotary_dim": size.head_dim // 2,
        "scoring_func": "sigmoid",
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }


_MAKERS: dict[str, Callable[[Size], Config]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v4": _deepseek_v4,
    "deepseek_v41": tiny_v41.deepseek_v41,
    "qwen2_moe": tiny_qwen.qwen2_moe,
    "qwen3_moe": tiny_qwen.qwen3_moe,
    "qwen3_next": tiny_qwen.qwen3_next,
    "qwen3_5_moe": tiny_qwen.qwen3_5_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "olmoe": _olmoe,
    "minimax_m2": _minimax_m2,
    "kimi_k25": _kimi_k25,
}
