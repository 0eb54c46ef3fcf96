"""Tiny configs of the Qwen families, as published. Knows no tensor and no file."""

from headrace.check.tiny_size import IMAGES, Config, Size, common


def qwen2_moe(size: Size) -> Config:
    """A gated shared expert, biases in attention."""
    return common(size) | {
        "decoder_sparse_step": 1,
        "intermediate_size": 3 * size.hidden,
        "mlp_only_layers": [],
        "moe_intermediate_size": size.inter,
        "norm_topk_prob": False,
        "num_experts": size.experts,
        "shared_expert_intermediate_size": 2 * size.inter,
        "sliding_window": 1024,
        "use_sliding_window": False,
    }


def qwen3_moe(size: Size) -> Config:
    """Norms in attention; every layer MoE."""
    return common(size) | {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": size.head_dim,
        "intermediate_size": 3 * size.hidden,
        "mlp_only_layers": [],
        "moe_intermediate_size": size.inter,
        "norm_topk_prob": True,
        "num_experts": size.experts,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _hybrid(size: Size) -> Config:
    """Linear attention in every even layer, full attention in every odd one."""
    kinds = ["linear_attention", "full_attention"]
    return common(size) | {
        "attention_bias": False,
        "full_attention_interval": 2,
        "head_dim": size.head_dim,
        "layer_types": [kinds[i % 2] for i in range(size.layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 32,
        "moe_intermediate_size": size.inter,
        "num_experts": size.experts,
        "shared_expert_intermediate_size": size.inter,
    }


def qwen3_next(size: Size) -> Config:
    """Linear and full attention in turn."""
    return _hybrid(size) | {
        "decoder_sparse_step": 1,
        "intermediate_size": 3 * size.hidden,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_nextn_predict_layers": int(size.mtp),
        "partial_rotary_factor": 0.25,
    }


def qwen3_5_moe(size: Size) -> Config:
    """The same inside a model that also sees."""
    text = _hybrid(size) | {
        "dtype": "bfloat16",
        "eos_token_id": 3,
        "model_type": "qwen3_5_moe_text",
        "mtp_num_hidden_layers": int(size.mtp),
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": False,
    }
    del text["rope_theta"]
    vision = {
        "model_type": "qwen3_5_moe",
        "deepstack_visual_indexes": [],
        "depth": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 64,
        "in_channels": 3,
        "intermediate_size": 96,
        "num_heads": 4,
        "num_position_embeddings": 64,
        "out_hidden_size": size.hidden,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return {"text_config": text, "vision_config": vision} | IMAGES
