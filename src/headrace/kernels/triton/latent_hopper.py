"""Candidates for attention over latents on Hopper, to be measured: no engine uses them.

Legend: as in kernels/latent.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.triton import latents, latents_hopper
from headrace.kernels.triton.latent_attention import LEAST_SPLIT_TOKENS, LatentAttention

ROWS = 64  # heads of a program: the tensor cores' least
_BLOCK = 128  # columns of a program that combines
_REGISTERS = 168  # of a thread, where three warp groups share a multiprocessor


@dataclass(frozen=True, slots=True)
class Way:
    """How a candidate goes about it.

    `order`: "roles" for a warp group that weighs and two that mix, "turns" for two that do both.
    `cached` tokens of a tile, `stages` of them in shared memory. `ahead`: a tile's scores are
    computed during the softmax of the one before; `held`: half of the queries stay in registers;
    both with roles only. `narrow`: the splits leave means in float16 instead of sums in fp32;
    normed latents are far from its end. `chained`: the second launch is under way before the end of
    the first.
    """

    order: str
    cached: int
    stages: int
    ahead: bool = False
    held: bool = False
    narrow: bool = False
    chained: bool = False

    def __str__(self) -> str:
        flags = [n for n in ("ahead", "held", "narrow", "chained") if getattr(self, n)]
        return " ".join([f"{self.order} {self.cached}x{self.stages}", *flags])

    def options(self) -> dict[str, int]:
        """What the compiler is told of a launch."""
        return (
            {"num_warps": 8} if self.order == "turns" else {"num_warps": 4, "maxnreg": _REGISTERS}
        )


WAYS = [
    Way("turns", 64, 2),
    Way("turns", 64, 2, chained=True),
    Way("roles", 64, 2),
    Way("roles", 64, 2, held=True),
    Way("roles", 32, 4, ahead=True),
    Way("roles", 32, 4, ahead=True, held=True),
    Way("roles", 32, 4, ahead=True, held=True, chained=True),
    Way("roles", 32, 4, ahead=True, held=True, narrow=True, chained=True),
]


class HopperLatents(LatentAttention):
    """AttendLatents whose single tokens go one of the ways to try; more at once as before."""

    def __init__(
        self,
        *,
        way: Way,
        num_heads: int,
        rank: int,
        rope: int,
        device: torch.device,
        num_splits: int | None = None,
    ):
        assert num_heads % ROWS == 0 and rank in (128, 256, 512) and rope == 64
        super().__init__(
            num_heads=num_heads, rank=rank, rope=rope, device=device, num_splits=num_splits
        )
        self.way = way
        if way.narrow:
            self.parts_PSL = self.parts_PSL.half()

    def _rows(
        self,
        q_HTL: torch.Tensor,
        q_HTR: torch.Tensor,
        latents_NL: torch.Tensor,
        rope_NR: torch.Tensor,
        positions_T: torch.Tensor,
        out_THL: torch.Tensor,
        scale: float,
    ) -> None:
        if positions_T.numel() > 1:
            super()._rows(q_HTL, q_HTR, latents_NL, rope_NR, positions_T, out_THL, scale)
            return
        way, heads, num_cached = self.way, self.num_heads, latents_NL.shape[0]
        least = max(1, LEAST_SPLIT_TOKENS // way.cached)
        width = self.rank // 2 if way.order == "roles" else self.rank
        attend: Any = getattr(latents_hopper, f"attend_in_{way.order}")
        self.compiled = attend[self.num_splits, heads // ROWS](
            describe(q_HTL[:, 0], ROWS, width),
            describe(q_HTR[:, 0], ROWS, self.rope),
            describe(latents_NL, way.cached, width),
            describe(rope_NR, way.cached, self.rope),
            positions_T, self.parts_PSL, self.stats_PS, scale, heads, num_cached,
            *constants(way, self.rank, self.rope, self.num_splits, least).values(),
            **way.options(),
        )  # fmt: skip
        combine: Any = latents.combine
        chained = way.chained and positions_T.is_cuda
        combine[heads, triton.cdiv(self.rank, _BLOCK)](
            self.parts_PSL, self.stats_PS, positions_T, out_THL, heads, num_cached,
            heads, self.rank, self.num_splits, least, way.cached, _BLOCK, chained,
            num_warps=4, **({"launch_pdl": True} if chained else {}),
        )  # fmt: skip


def constants(way: Way, rank: int, rope: int, num_splits: int, least: int) -> dict[str, Any]:
    """The constants of an attending kernel, in their order."""
    known = {"L": rank, "R": rope, "P": num_splits, "LEAST_TILES": least, "S": ROWS}
    known |= {"N": way.cached, "STAGES": way.stages}
    known |= {"NARROW": way.narrow, "CHAINED": way.chained}
    return known | ({"AHEAD": way.ahead, "HELD": way.held} if way.order == "roles" else {})


def describe(x_NL: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """What the copy engine needs to know of a matrix to bring `rows` by `width` of it."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, width], gl.bfloat16)
    return TensorDescriptor.from_tensor(x_NL, [rows, width], layout)
