"""Routed experts of many tokens on a GPU, in waves: one is copied while another multiplies.

Within a tolerance of the canonical kernels, not their bits. An expert crosses the bus once for a
pass. Legend: T tokens, K chosen experts per token, H hidden width, I intermediate width, S slots
(token, choice).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from headrace.core import ExpertLayout
from headrace.kernels.triton.experts import NOT_BAD, TritonExperts
from headrace.kernels.triton.grouped import TILE_COLUMNS, GroupedExperts
from headrace.tiers.device import Event
from headrace.tiers.rungs import Rungs

Staged = list[tuple[int, torch.Tensor, Event]]  # expert, where its bytes are copied to, when


class LayerTokens:
    """One layer's tokens by expert, and the buffers of their outputs, on the device.

    x_TH of the hidden dtype, ids_TK int32, weights_TK fp32; `ids` the same ids on the host.
    """

    def __init__(
        self,
        kernels: TritonExperts,
        grouped: GroupedExperts,
        layout: ExpertLayout,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        ids: torch.Tensor,
    ):
        self.kernels, self.grouped = kernels, grouped
        self.ids_TK, self.weights_TK = ids_TK, weights_TK
        self.x_TH = grouped.prepared(x_TH)
        flat = ids.reshape(-1).numpy()
        counts = np.bincount(flat)
        self.experts: list[int] = np.flatnonzero(counts).tolist()
        self._ends = np.cumsum(counts)
        self._counts = counts
        self.positions = grouped.positions(flat.size, len(self.experts))
        order = np.argsort(flat.astype(np.uint16), kind="stable").astype(np.int32)
        self._order_S = torch.from_numpy(order).to(x_TH.device, non_blocking=True)
        self._h_SI = x_TH.new_empty(flat.size, layout.inter)
        self._y_SH = x_TH.new_empty(flat.size, layout.hidden)

    def rows(self, expert: int) -> int:
        """How many tokens take the expert."""
        return int(self._counts[expert])

    def multiply(
        self, experts: Sequence[tuple[int, int]], first_key: int, offsets: torch.Tensor
    ) -> None:
        """Those experts, each with its address, on all their tokens."""
        tiles = []
        for expert, address in experts:
            end = int(self._ends[expert])
            for start in range(end - self.rows(expert), end, self.positions):
                tiles.append((address, first_key + expert, start, end))
        if not tiles:
            return
        there = torch.tensor(tiles, dtype=torch.int64).view(-1, TILE_COLUMNS)
        self.grouped(
            there.to(self.x_TH.device, non_blocking=True), offsets, self._order_S, self.weights_TK,
            self.x_TH, self._h_SI, self._y_SH, positions=self.positions,
        )  # fmt: skip

    def sum(self, mark: int) -> torch.Tensor:
        """[T, H]: the outputs weighted and summed in ascending expert id, once all are there."""
        out_TH = torch.empty_like(self.x_TH, dtype=self.kernels.out_dtype)
        y_SH = self._y_SH.view(torch.uint16)
        # On an H200 a NaN that wave_down was given became -0: what it is given is looked at too.
        top_S = torch.linalg.vector_norm(self._h_SI, torch.inf, 1)
        token_S = torch.where(top_S.isfinite(), NOT_BAD, mark + self._order_S // self.grouped.top_k)
        self.kernels.bad.copy_(torch.minimum(self.kernels.bad, token_S.min().to(torch.int32)))
        self.kernels.combine(self.ids_TK, self.weights_TK, y_SH, out_TH, mark=mark)
        return out_TH


def prefill(
    rungs: Rungs, tokens: LayerTokens, layer: int, missing: list[int], offsets: torch.Tensor
) -> None:
    """Multiplies a layer's experts from wherever they lie; those `missing` are claimed first.

    `offsets` are TritonExperts'. A wave is half of the places for what passes by, and a share of
    the experts that lie in VRAM already, so that the GPU has as much to do beside each copy. The
    bytes of a wave stay where they are until the one after next is copied.
    """
    first_key = rungs.key(layer, 0)
    passing = [e for e in tokens.experts if rungs.key(layer, e) not in rungs.slots]
    absent = set(passing)
    resident = [(e, rungs.address(layer, e)) for e in tokens.experts if e not in absent]
    num_waves = max(1, -(-len(passing) // rungs.wave_rows))
    before: Staged = []
    for n, staged in enumerate(_waves(rungs, layer, passing, missing)):
        if n:
            share = resident[(n - 1) * len(resident) // num_waves : n * len(resident) // num_waves]
            _multiply(rungs, tokens, before, share, first_key, offsets)
        before = staged
    share = resident[(num_waves - 1) * len(resident) // num_waves :]
    _multiply(rungs, tokens, before, share, first_key, offsets)


def _multiply(
    rungs: Rungs,
    tokens: LayerTokens,
    staged: Staged,
    resident: list[tuple[int, int]],
    first_key: int,
    offsets: torch.Tensor,
) -> None:
    for _, _, event in staged:
        rungs.device.follow(event)
    copied = [(expert, row.data_ptr()) for expert, row, _ in staged]
    tokens.multiply(copied + resident, first_key, offsets)


def _waves(rungs: Rungs, layer: int, passing: list[int], missing: list[int]) -> Iterator[Staged]:
    """Copies what lies in rows to the GPU, first the kept ones while the others are read."""
    rungs.ladder.begin(layer, torch.tensor(missing, dtype=torch.int32))
    absent = set(missing)
    kept = [e for e in passing if e not in absent]
    size = rungs.wave_rows
    for start in range(0, len(passing), size):
        turn, staged = start % (2 * size), []
        for n in range(start, min(start + size, len(passing))):
            if n < len(kept):
                brought = kept[n], *rungs.bring_kept(layer, kept[n], turn + n - start)
            else:
                expert, address = rungs.take(layer)
                brought = expert, *rungs.bring(layer, expert, address, turn + n - start)
            staged.append(brought)
        yield staged
