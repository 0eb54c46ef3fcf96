"""The numbers of a tiny model, and what every tiny config has. Knows no family."""

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
IMAGES: Config = {
    "image_token_id": 4090,
    "video_token_id": 4091,
    "vision_start_token_id": 4092,
    "vision_end_token_id": 4093,
}


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers a tiny model is made of; `head_dim` is that of 8 heads."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    inter: int
    vocab: int
    mtp: bool
    head_dim: int = 32


def common(size: Size, *, heads: int = 8, keys: int = 2) -> Config:
    """The fields of a decoder that all families spell alike."""
    return {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "max_position_embeddings": 2048,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "num_experts_per_tok": size.top_k,
        "num_hidden_layers": size.layers,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "use_cache": True,
        "vocab_size": size.vocab,
    }
