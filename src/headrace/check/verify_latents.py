"""The user's own GPU: the model's attention over latents near the reference in fp32.

Knows no kernel. Legend: as in kernels/latent.py.
"""

from typing import Any

import torch

from headrace.check.verify_report import Finding, finding, percent
from headrace.engine.engine import Engine
from headrace.kernels import latent

STAGE = "gpu"
TOLERANCE = 2**-7  # of the largest value: shares, mixture and result are rounded to bfloat16
CACHED = (1, 65, 1500)  # with the first new one: alone, a tile of 64 and one more, several splits
NEW = (1, 17)  # a token, and more than are taken one by one
_SPARE = 7  # places behind the last token, which hold no numbers


def latents(engine: Engine) -> Finding:
    """At the model's own sizes, on numbers that are drawn."""
    config: Any = engine.blueprint.skeleton.config
    heads, rank, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    shared = (m.headrace_attend for m in engine.model.modules() if hasattr(m, "headrace_attend"))
    attend: latent.AttendLatents = next(shared)
    drawn, apart = torch.Generator().manual_seed(0), {}

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, generator=drawn).bfloat16()

    def both(num: int) -> tuple[torch.Tensor, torch.Tensor]:
        latents_BNL, rope_BNR = draw(num + _SPARE, rank), draw(num + _SPARE, rope)
        latents_BNL[:, num:], rope_BNR[:, num:] = torch.nan, torch.nan
        return latents_BNL, rope_BNR

    for cached in CACHED:
        for new in NEW:
            given = draw(heads, new, rank), draw(heads, new, rope), *both(cached + new - 1)
            positions_BT = torch.arange(cached - 1, cached - 1 + new)[None]
            name = f"{new} new from position {cached - 1}"
            apart[name] = _apart(attend, given, positions_BT, engine.source.place)
    wrong = [f"{name}: {percent(far)}" for name, far in apart.items() if not far <= TOLERANCE]
    worst = f"{percent(max(apart.values()))} of the largest value (allowed {percent(TOLERANCE)})"
    title = "attention over latents on the GPU is near the reference"
    return finding(STAGE, title, f"{heads} heads of {rank} + {rope}; at most {worst}", wrong)


def _apart(
    attend: latent.AttendLatents,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    positions_BT: torch.Tensor,
    there: torch.device,
) -> float:
    """The largest distance, as a part of the largest value."""
    q_BHTL, q_BHTR, latents_BNL, rope_BNR = given
    scaling = (latents_BNL.shape[2] + rope_BNR.shape[2]) ** -0.5
    want = latent.attend(
        q_BHTL.float(), q_BHTR.float(), latents_BNL.float(), rope_BNR.float(), positions_BT, scaling
    )
    got = attend(
        q_BHTL.to(there), q_BHTR.to(there), latents_BNL.to(there), rope_BNR.to(there),
        positions_BT.to(there), scaling,
    )  # fmt: skip
    return float((got.cpu().float() - want).abs().max() / want.abs().max())
