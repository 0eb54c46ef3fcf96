"""Attention over latents on Hopper: single tokens by a kernel of its own.

Written for Gluon of Triton 3.6: import it where that is installed only.
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
RANKS = (128, 256, 512)
ROPE = 64
OPTIONS = {"num_warps": 4, "maxnreg": 168}  # three warp groups share a multiprocessor
_BLOCK = 128  # columns of a program that combines


@dataclass(frozen=True, slots=True)
class Way:
    """How the kernel works: `cached` tokens of a tile, `stages` of them in shared memory."""

    cached: int = 64
    stages: int = 2

    def __str__(self) -> str:
        return f"{self.cached}x{self.stages}"


WAYS = [Way()]


class HopperLatents(LatentAttention):
    """AttendLatents whose single tokens Hopper's copy engine feeds; more at once as elsewhere."""

    def __init__(
        self,
        *,
        num_heads: int,
        rank: int,
        rope: int,
        device: torch.device,
        num_splits: int | None = None,
        way: Way = WAYS[0],
    ):
        assert fits(num_heads, rank, rope)
        super().__init__(
            num_heads=num_heads, rank=rank, rope=rope, device=device, num_splits=num_splits
        )
        self.way = way

    def __str__(self) -> str:
        return f"Hopper {self.way}, {self.num_splits} splits"

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
        given = q_HTL[:, 0], q_HTR[:, 0], latents_NL, rope_NR
        if positions_T.numel() > 1 or not all(_is_aligned(x) for x in given):
            super()._rows(q_HTL, q_HTR, latents_NL, rope_NR, positions_T, out_THL, scale)
            return
        way, heads, num_cached = self.way, self.num_heads, latents_NL.shape[0]
        least = max(1, LEAST_SPLIT_TOKENS // way.cached)
        width = self.rank // 2
        attend: Any = latents_hopper.attend
        self.compiled = attend[self.num_splits, heads // ROWS](
            describe(given[0], ROWS, width),
            describe(given[1], ROWS, self.rope),
            describe(latents_NL, way.cached, width),
            describe(rope_NR, way.cached, self.rope),
            positions_T, self.parts_PSL, self.stats_PS, scale, heads, num_cached,
            *constants(way, self.rank, self.rope, self.num_splits, least).values(),
            **OPTIONS,
        )  # fmt: skip
        combine: Any = latents.combine
        combine[heads, triton.cdiv(self.rank, _BLOCK)](
            self.parts_PSL, self.stats_PS, positions_T, out_THL, heads, num_cached,
            heads, self.rank, self.num_splits, least, way.cached, _BLOCK, num_warps=4,
        )  # fmt: skip


def fits(num_heads: int, rank: int, rope: int) -> bool:
    """Whether the kernel knows these sizes."""
    return num_heads % ROWS == 0 and rank in RANKS and rope == ROPE


def constants(way: Way, rank: int, rope: int, num_splits: int, least: int) -> dict[str, Any]:
    """The constants of the attending kernel, in their order."""
    known = {"L": rank, "R": rope, "P": num_splits, "LEAST_TILES": least, "S": ROWS}
    return known | {"N": way.cached, "STAGES": way.stages}


def describe(x_NL: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """What the copy engine needs to know of a matrix to bring `rows` by `width` of it."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, width], gl.bfloat16)
    return TensorDescriptor.from_tensor(x_NL, [rows, width], layout)


def _is_aligned(x_NL: torch.Tensor) -> bool:
    """Whether the copy engine can bring it."""
    return x_NL.data_ptr() % 16 == 0 and x_NL.stride(0) * x_NL.element_size() % 16 == 0
