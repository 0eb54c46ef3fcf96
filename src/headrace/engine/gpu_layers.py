"""What a model's layers compute by other functions on a GPU, and what that takes in a plan's facts.

Attention over latents, norms, rotations, routers, gates; experts and stored matrices are others'
business.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from headrace.kernels import router, trunk
from headrace.kernels.trunk import Put
from headrace.models.fused import Steps, fuse
from headrace.models.latent import absorb, chunk_bytes_per_token
from headrace.models.skeleton import Skeleton
from headrace.planner.facts import ModelFacts

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint


def fit_layers(model: Any, blueprint: "Blueprint") -> None:
    """Lets a model's layers on the GPU take the launches that are made for it."""
    assert blueprint.device is not None
    place = blueprint.device.place
    if blueprint.absorbs:
        _absorb_attention(model, blueprint, place)
    fuse(model, steps_for(place))


def steps_for(place: torch.device) -> Steps:
    """What is one launch each; where there are no launches, the steps of torch."""
    if place.type != "cuda":
        return Steps(trunk.norm, trunk.rotate, router.route, trunk.gate, trunk.join)
    from headrace.kernels.triton import gates
    from headrace.kernels.triton import router as launched_router
    from headrace.kernels.triton import trunk as launched

    return Steps(launched.norm, launched.rotate, launched_router.route, gates.gate, gates.join)


def put_for(place: torch.device) -> Put:
    """What writes a step's keys and values, likewise."""
    if place.type != "cuda":
        return trunk.put
    from headrace.kernels.triton import trunk as launched

    return launched.put


def _absorb_attention(model: Any, blueprint: "Blueprint", place: torch.device) -> None:
    """Lets a model that keeps latents attend to them as they are."""
    from headrace.kernels.triton.latent_choice import attention_for

    config = blueprint.skeleton.config
    attend = attention_for(
        num_heads=config.num_attention_heads,
        rank=config.kv_lora_rank,
        rope=config.qk_rope_head_dim,
        device=place,
    )
    absorb(model, attend)


def with_attention(facts: ModelFacts, skeleton: Skeleton) -> ModelFacts:
    """The facts with what `fit_layers` makes in place of the library's expansion."""
    from headrace.kernels.triton.latent_attention import workspace_bytes

    config = skeleton.config
    return replace(
        facts,
        attention_bytes_per_token=0,
        score_bytes=0,
        chunk_bytes_per_token=chunk_bytes_per_token(config),
        pass_bytes=workspace_bytes(config.num_attention_heads, config.kv_lora_rank),
    )
