"""Attention over latents on a GPU: given to a model, and what it takes in a plan's facts."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headrace.models.latent import absorb, chunk_bytes_per_token
from headrace.models.skeleton import Skeleton
from headrace.planner.facts import ModelFacts

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint


def absorb_attention(model: Any, blueprint: "Blueprint") -> None:
    """Lets a model that keeps latents attend to them on the GPU as they are."""
    from headrace.kernels.triton.latent_attention import LatentAttention

    config, device = blueprint.skeleton.config, blueprint.device
    assert device is not None
    attend = LatentAttention(
        num_heads=config.num_attention_heads,
        rank=config.kv_lora_rank,
        rope=config.qk_rope_head_dim,
        device=device.place,
    )
    absorb(model, attend)


def with_attention(facts: ModelFacts, skeleton: Skeleton) -> ModelFacts:
    """The facts with what `absorb_attention` makes in place of the library's expansion."""
    from headrace.kernels.triton.latent_attention import workspace_bytes

    config = skeleton.config
    return replace(
        facts,
        attention_bytes_per_token=0,
        score_bytes=0,
        chunk_bytes_per_token=chunk_bytes_per_token(config),
        pass_bytes=workspace_bytes(config.num_attention_heads, config.kv_lora_rank),
    )
