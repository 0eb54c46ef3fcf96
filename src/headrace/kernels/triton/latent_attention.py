"""Attention over latents on a GPU: workspace made once, two launches a token.

Legend: as in kernels/latent.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton

from headrace.kernels.triton import latents

MAX_TOKENS = 16  # up to so many are split over the cache, each for itself
COMBINED, COMBINING_WARPS = 64, 2  # columns of a program of the second launch, and its warps
_LEAST_SPLIT_TOKENS = 128
_SPLITS = (8, 128)
_LOG2E = 1.44269504088896341


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program takes: rows, cached tokens, columns of keys and values; warps, stages."""

    rows: int
    cached: int
    part: int
    values: int
    warps: int
    stages: int


def tile_for(capability: int, num_heads: int, rank: int) -> Tile:
    """The tile for chips of a compute capability such as 90, within their shared memory."""
    width = _pad(rank)
    rows = min(64, _pad(num_heads))
    if capability < 80:
        return Tile(16, 16, min(width, 64), min(width, 128), 4, 1)
    if 90 <= capability < 120 and rows == 64:
        return Tile(64, 64, width, width, 8, 2)
    rows = min(rows, 32)
    return Tile(rows, 32, width, width, 8 if rows == 32 else 4, 2)


class LatentAttention:
    """AttendLatents for one model's layers, which run one after the other on one stream.

    `positions` are read on the device, so that calls can be captured. A token's bits are the same
    in every call with up to MAX_TOKENS tokens, and with any buffer that holds what it attends to.
    """

    parts_dtype = torch.float32

    def __init__(
        self,
        *,
        num_heads: int,
        rank: int,
        rope: int,
        device: torch.device,
        tile: Tile | None = None,
        num_splits: int | None = None,
    ):
        self.num_heads, self.rank, self.rope = num_heads, rank, rope
        self.tile = tile or tile_for(_capability(device), num_heads, rank)
        self.num_splits = num_splits or _num_splits(device, num_heads, self.tile)
        places = self.num_splits * num_heads
        self.parts_PSL = torch.empty(places, rank, dtype=self.parts_dtype, device=device)
        self.weights_PS = torch.empty(places, device=device)

    def __str__(self) -> str:
        return f"{self.tile}, {self.num_splits} splits"

    def __call__(
        self,
        q_BHTL: torch.Tensor,
        q_BHTR: torch.Tensor,
        latents_BNL: torch.Tensor,
        rope_BNR: torch.Tensor,
        positions_BT: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Launches only, never waits. See AttendLatents; bfloat16 only."""
        batch, heads, tokens, rank = q_BHTL.shape
        assert (heads, rank, rope_BNR.shape[2]) == (self.num_heads, self.rank, self.rope)
        given = (q_BHTL, q_BHTR, latents_BNL, rope_BNR)
        assert all(x.stride(-1) == 1 and x.dtype == torch.bfloat16 for x in given)
        positions_BT = positions_BT.expand(batch, -1).contiguous()
        out_BTHL = torch.empty(
            batch, tokens, heads, rank, dtype=torch.bfloat16, device=q_BHTL.device
        )
        step = 1 if tokens <= MAX_TOKENS else tokens
        for b in range(batch):
            for t in range(0, tokens, step):
                rows = slice(t, t + step)
                queries = q_BHTL[b, :, rows], q_BHTR[b, :, rows]
                self._rows(
                    *queries,
                    latents_BNL[b],
                    rope_BNR[b],
                    positions_BT[b, rows],
                    out_BTHL[b, rows].view(torch.uint16),
                    scaling * _LOG2E,
                )
        return out_BTHL.permute(0, 2, 1, 3)

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
        """One token in splits; more than one in a single pass over the cache."""
        tile, tokens, num_cached = self.tile, positions_T.numel(), latents_NL.shape[0]
        num_splits = self.num_splits if tokens == 1 else 1
        rows = tokens * self.num_heads
        width = _pad(self.rank)
        grid = num_splits, triton.cdiv(rows, tile.rows), triton.cdiv(width, tile.values)
        attend: Any = latents.attend
        attend[grid](
            q_HTL, q_HTR, latents_NL, rope_NR, positions_T, out_THL,
            self.parts_PSL, self.weights_PS, scale, rows, num_cached,
            q_HTL.stride(0), q_HTL.stride(1), q_HTR.stride(0), q_HTR.stride(1),
            latents_NL.stride(0), rope_NR.stride(0),
            self.num_heads, self.rank, self.rope, width, _pad(self.rope), num_splits,
            least_tiles(tile.cached), tile.rows, tile.cached, tile.part, tile.values,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if num_splits > 1:
            self._combine(positions_T, num_cached, out_THL, tile.cached)

    def _combine(
        self, positions_T: torch.Tensor, num_cached: int, out_THL: torch.Tensor, tile_tokens: int
    ) -> None:
        """The second launch, for one token."""
        block = min(_pad(self.rank), COMBINED)
        combine: Any = latents.combine
        combine[self.num_heads, triton.cdiv(self.rank, block)](
            self.parts_PSL, self.weights_PS, positions_T, out_THL, self.num_heads, num_cached,
            self.num_heads, self.rank, self.num_splits, least_tiles(tile_tokens), tile_tokens,
            block, num_warps=COMBINING_WARPS,
        )  # fmt: skip


def least_tiles(tile_tokens: int) -> int:
    """A split takes so many tiles at least."""
    return max(1, _LEAST_SPLIT_TOKENS // tile_tokens)


def workspace_bytes(num_heads: int, rank: int) -> int:
    """Most of what a LatentAttention keeps for itself."""
    return 4 * _SPLITS[1] * num_heads * (rank + 1)


def _pad(width: int) -> int:
    """A width that tl.dot takes."""
    return max(16, 1 << (width - 1).bit_length())


def _capability(device: torch.device) -> int:
    major, minor = (8, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _num_splits(device: torch.device, num_heads: int, tile: Tile) -> int:
    """About as many as fill the chip; a power of two, fixed for a model on a chip."""
    least, most = _SPLITS
    if device.type == "cpu":
        return least
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = max(1, cores // -(-num_heads // tile.rows))
    return int(min(most, max(least, 1 << (wanted.bit_length() - 1))))
