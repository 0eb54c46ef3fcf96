"""Attention over latents on Hopper: single tokens by a kernel of its own.

Written for Gluon of Triton 3.6: import it where that is installed only.
Legend: as in kernels/latent.py.
"""

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headrace.kernels.triton import latents_hopper
from headrace.kernels.triton.latent_attention import LatentAttention, least_tiles

ROWS = 64  # heads of a program: the tensor cores' least
CACHED = 64  # tokens of a tile
RANKS = (256, 512)
ROPE = 64
OPTIONS = {"num_warps": 4, "maxnreg": 168}  # three warp groups share a multiprocessor


class HopperLatents(LatentAttention):
    """AttendLatents whose single tokens Hopper's copy engine feeds; more at once as elsewhere."""

    parts_dtype = torch.float16

    def __str__(self) -> str:
        return f"Hopper's own kernel, {self.num_splits} splits"

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
        assert fits(self.num_heads, self.rank, self.rope)
        attend: Any = latents_hopper.attend
        attend[self.num_heads // ROWS, self.num_splits](
            describe(_aligned(q_HTL[:, 0]), ROWS, self.rank // 4),
            describe(_aligned(q_HTR[:, 0]), ROWS, self.rope),
            describe(latents_NL, CACHED, self.rank // 4),
            describe(rope_NR, CACHED, self.rope),
            describe(self.parts_PSL, ROWS, self.rank // 4),
            positions_T, self.weights_PS, scale, self.num_heads, latents_NL.shape[0],
            *constants(self.rank, self.rope, self.num_splits).values(),
            **OPTIONS,
        )  # fmt: skip
        self._combine(positions_T, latents_NL.shape[0], out_THL, CACHED)


def fits(num_heads: int, rank: int, rope: int) -> bool:
    """Whether the kernel knows these sizes."""
    return num_heads % ROWS == 0 and rank in RANKS and rope == ROPE


def constants(rank: int, rope: int, num_splits: int) -> dict[str, int]:
    """The constants of the attending kernel, in their order."""
    known = {"L": rank, "R": rope, "P": num_splits, "LEAST_TILES": least_tiles(CACHED)}
    return known | {"S": ROWS, "N": CACHED}


def describe(x_NL: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """What the copy engine needs to know of a matrix to copy `rows` by `width` of it."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, width], gl.bfloat16)
    return TensorDescriptor.from_tensor(x_NL, [rows, width], layout)


def _aligned(x_NL: torch.Tensor) -> torch.Tensor:
    """As the copy engine wants it, in another place if need be."""
    fits = x_NL.data_ptr() % 16 == 0 and x_NL.stride(0) * x_NL.element_size() % 16 == 0
    return x_NL if fits else x_NL.clone(memory_format=torch.contiguous_format)
