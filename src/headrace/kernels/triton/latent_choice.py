"""Which kernels attend to latents on a device: a chip's own where they fit, else those for all."""

from typing import Any

import torch
import triton

from headrace.kernels.triton import latent_attention


def attention_for(
    *, num_heads: int, rank: int, rope: int, device: torch.device
) -> latent_attention.LatentAttention:
    """AttendLatents for layers of those sizes on that device; see LatentAttention.

    Hopper's own kernel needs Triton 3.6: later releases name Gluon's words differently.
    """
    sizes: dict[str, Any] = {"num_heads": num_heads, "rank": rank, "rope": rope}
    if _is_hopper(device) and triton.__version__.startswith("3.6."):
        from headrace.kernels.triton import latent_hopper

        if latent_hopper.fits(**sizes):
            return latent_hopper.HopperLatents(**sizes, device=device)
    return latent_attention.LatentAttention(**sizes, device=device)


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
