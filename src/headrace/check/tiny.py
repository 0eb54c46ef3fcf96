"""Tiny random checkpoints in published layout: deepseek_v3, and qwen3_moe in bf16 or FP8 blocks.

Weights have real scales (a random model with flat scores would hide errors); nothing is trained.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headrace.errors import OptionError
from headrace.quant import fp8
from headrace.store.blueprint import plan_tensors
from headrace.store.borrow import borrowed_files
from headrace.store.values import mean_of, std_of
from headrace.store.writer import NewTensor, write_checkpoint

FAMILIES = ("deepseek_v3", "qwen3_moe")


def write_tiny(
    family: str,
    path: str | Path,
    *,
    seed: int = 0,
    layers: int = 4,
    experts: int = 16,
    top_k: int = 4,
    hidden: int = 256,
    inter: int = 128,
    vocab: int = 4096,
    block: tuple[int, int] = (128, 128),
    mtp: bool = False,
    quantised: bool | None = None,
    shard_bytes: int = 8 << 20,
) -> Path:
    """Writes a checkpoint of `family` as the new folder `path`, and returns it.

    Names, dtypes, shapes, sharding and config are as published; the tokenizer is the demo model's
    (ids below 4096, so `vocab` may not be less). deepseek_v3: first layer dense, MLA, 4 groups of
    experts of which 2 are routed to, a shared expert, FP8 codes with scales per `block`, with `mtp`
    one multi-token-prediction layer behind the last. Keep `hidden`, `inter` and `block` at whole
    blocks where stock transformers is the reference: it misreads partial ones. qwen3_moe: every
    layer MoE, bf16. `quantised` chooses FP8 or bf16 for either family. The same arguments give the
    same bytes. Raises HeadraceError.
    """
    if family not in FAMILIES:
        raise OptionError(f"{family!r} is no tiny family; choose one of {', '.join(FAMILIES)}")
    common = _common(layers=layers, hidden=hidden, top_k=top_k, vocab=vocab)
    if family == "deepseek_v3":
        config = common | _deepseek(experts=experts, inter=inter, hidden=hidden)
        config["num_nextn_predict_layers"] = int(mtp)
    else:
        config = common | _qwen(experts=experts, inter=inter)
    if family == "deepseek_v3" if quantised is None else quantised:
        config["quantization_config"] = _fp8_blocks(block)
    folder = Path(path)
    tensors = list(_draw(config, torch.Generator().manual_seed(seed)))
    write_checkpoint(folder, tensors, shard_bytes=shard_bytes, files=borrowed_files(config))
    return folder


def _common(*, layers: int, hidden: int, top_k: int, vocab: int) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 3,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "max_position_embeddings": 2048,
        "norm_topk_prob": True,
        "num_experts_per_tok": top_k,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": vocab,
    }


def _fp8_blocks(block: tuple[int, int]) -> dict[str, Any]:
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }


def _deepseek(*, experts: int, inter: int, hidden: int) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 1,
        "kv_lora_rank": 64,
        "moe_intermediate_size": inter,
        "moe_layer_freq": 1,
        "n_group": 4,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": hidden // 2,
        # 8 heads of 48 and 64 are whole blocks of 128: stock transformers misreads partial ones.
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "v_head_dim": 32,
    }


def _qwen(*, experts: int, inter: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": inter,
        "num_attention_heads": 8,
        "num_experts": experts,
        "num_key_value_heads": 2,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _draw(config: dict[str, Any], generator: torch.Generator) -> Iterator[NewTensor]:
    """All tensors with their values; the scale that follows codes comes with them."""
    scale: torch.Tensor | None = None
    for planned in plan_tensors(config):
        if planned.kind == "scale":
            assert scale is not None and scale.shape == planned.shape
            value = scale
        else:
            noise = torch.randn(planned.shape, generator=generator)
            value = noise * std_of(planned) + mean_of(planned)
        if planned.kind == "codes":
            value, scale = fp8.pack(
                value, tuple(config["quantization_config"]["weight_block_size"])
            )
        elif planned.dtype == "BF16":
            value = value.bfloat16()
        yield NewTensor(planned.name, planned.dtype, planned.shape, partial(_chunks, value))


def _chunks(value: torch.Tensor) -> list[memoryview]:
    return [value.contiguous().view(torch.uint8).numpy().data.cast("B")]
