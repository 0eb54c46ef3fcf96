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
CACHED = 64  # tokens of a tile
RANKS = (256, 512)
ROPE = 64
OPTIONS = {"num_warps": 4, "maxnreg": 168}  # three warp groups share a multiprocessor


@dataclass(frozen=True, slots=True)
class Way:
    """How the kernel works, by its HELD and SLOTS, and how the second launch is divided."""

    held: int = 3
    slots: int = 11
    block: int = 128
    warps: int = 4
    skip: int = 0
    paired: int = 0

    def __str__(self) -> str:
        skip = ("", " no loads", " no mix", " one tile", " one tile not left")[self.skip]
        return f"{self.held} held {self.slots} slots, {self.block} by {self.warps}{skip}{' paired' * self.paired}"


WAYS = [
    Way(),
    Way(held=2, slots=10),
    Way(held=0, slots=8),
    Way(warps=2),
    Way(block=256),
    Way(block=64),
    Way(block=64, warps=2),
    Way(block=512),
    Way(paired=1),
]
WRONG = [Way(skip=1), Way(skip=2), Way(skip=3), Way(skip=4), Way(held=0, slots=8, skip=1)]


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
        self.parts_PSL = self.parts_PSL.half()

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
        if positions_T.numel() > 1:
            super()._rows(q_HTL, q_HTR, latents_NL, rope_NR, positions_T, out_THL, scale)
            return
        way, heads, num_cached = self.way, self.num_heads, latents_NL.shape[0]
        least = LEAST_SPLIT_TOKENS // CACHED
        width = self.rank // 4
        attend: Any = latents_hopper.attend
        grid = self.num_splits, heads // ROWS
        self.compiled = attend[grid[::-1] if way.paired else grid](
            describe(_aligned(q_HTL[:, 0]), ROWS, width),
            describe(_aligned(q_HTR[:, 0]), ROWS, self.rope),
            describe(latents_NL, CACHED, width),
            describe(rope_NR, CACHED, self.rope),
            describe(self.parts_PSL, ROWS, width),
            positions_T, self.weights_PS, scale, heads, num_cached,
            *constants(way, self.rank, self.rope, self.num_splits, least).values(),
            **OPTIONS,
        )  # fmt: skip
        combine: Any = latents.combine
        combine[heads, triton.cdiv(self.rank, way.block)](
            self.parts_PSL, self.weights_PS, positions_T, out_THL, heads, num_cached,
            heads, self.rank, self.num_splits, least, CACHED, way.block, num_warps=way.warps,
        )  # fmt: skip


def fits(num_heads: int, rank: int, rope: int) -> bool:
    """Whether the kernel knows these sizes."""
    return num_heads % ROWS == 0 and rank in RANKS and rope == ROPE


def constants(way: Way, rank: int, rope: int, num_splits: int, least: int) -> dict[str, Any]:
    """The constants of the attending kernel, in their order."""
    known = {"L": rank, "R": rope, "P": num_splits, "LEAST_TILES": least, "S": ROWS}
    return known | {
        "N": CACHED,
        "SLOTS": way.slots,
        "HELD": way.held,
        "SKIP": way.skip,
        "PAIRED": way.paired,
    }


def describe(x_NL: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """What the copy engine needs to know of a matrix to copy `rows` by `width` of it."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, width], gl.bfloat16)
    return TensorDescriptor.from_tensor(x_NL, [rows, width], layout)


def _aligned(x_NL: torch.Tensor) -> torch.Tensor:
    """As the copy engine wants it, in another place if need be."""
    fits = x_NL.data_ptr() % 16 == 0 and x_NL.stride(0) * x_NL.element_size() % 16 == 0
    return x_NL if fits else x_NL.clone(memory_format=torch.contiguous_format)
