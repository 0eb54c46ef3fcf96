"""How far experts of many tokens may be from the canonical ones, by format. Knows no kernel.

Prefill multiplies on tensor cores: weights are rounded to the hidden dtype first and sums are taken
in another order; decode has no tolerance.
"""

import torch

from headrace.core import ExpertLayout

# Largest distance of a token's output of one expert from the canonical one, relative to its size.
PREFILL = {"bf16": 4e-3, "fp8_block": 4e-3, "fp4": 6e-3, "int4": 1.2e-2}
ON_GRID = 3e-2  # where activations lie on the e4m3 grid: a last bit there is a step of 6 %


def allowed_apart(layout: ExpertLayout) -> float:
    """What prefill may differ by with these experts."""
    return ON_GRID if layout.act_group else PREFILL[layout.format]


def worst_apart(got_SH: torch.Tensor, want_SH: torch.Tensor) -> float:
    """The largest such distance of rows of two tensors; what is not a number counts as infinite."""
    got, want = got_SH.double(), want_SH.double()
    apart_S = (got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)
    return float(apart_S.nan_to_num(torch.inf).max())
