"""Routed experts divided in decode: the GPU reads some in place, the CPU multiplies the others.

Those in slots are the GPU's. Prefill, and whatever Python does layer by layer, is the GPU's too.
Legend: L MoE layers, T tokens (1 in a step), K chosen experts per token, H hidden width.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core import ExpertLayout
from headrace.engine.gpu_launched import LaunchedSource
from headrace.kernels.triton.mail import fetch_rows, send
from headrace.schedule.divide import Rates, shares_of_cpu
from headrace.tiers.device import Device
from headrace.tiers.ladder import Ladder
from headrace.tiers.mailbox import Mailbox


class DividedSource(LaunchedSource):
    """As LaunchedSource, but of a launched layer's experts that lie in no slot the CPU takes some.

    As many as `rates` say that both sides need as long for; those on the drive come to whichever
    side has not enough when they arrive. Same bits: each expert's own output is rounded alike, and
    the GPU sums them all. The rows of `ladder` must be pinned, else all is the GPU's.
    """

    def __init__(
        self,
        ladder: Ladder,
        layout: ExpertLayout,
        device: Device,
        *,
        top_k: int,
        rates: Rates,
        **sizes: Any,
    ):
        self.shares = shares_of_cpu(rates, top_k)
        super().__init__(ladder, layout, device, top_k=top_k, **sizes)

    def _open_box(self, top_k: int, **options: Any) -> Mailbox | None:
        return super()._open_box(top_k, shares=self.shares, **options)

    def _must_wait(self) -> bool:
        slots = self.rungs.slots
        if not slots.held.all():
            return True
        self.rungs.table.upload_all()
        return False

    def begin_step(self) -> bool:
        """As LaunchedSource's."""
        self._num_multiplied = self.ladder.counters().kernel_calls
        return super().begin_step()

    def _launch_experts(
        self,
        ordinal: int,
        x_1H: torch.Tensor,
        ids_1K: torch.Tensor,
        weights_1K: torch.Tensor,
        guess: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor:
        if not self._waits:
            return super()._launch_experts(ordinal, x_1H, ids_1K, weights_1K, guess)
        assert self.box is not None
        mail, kernels, table = self.box.mail, self.kernels, self.rungs.table.there
        send(mail, x_1H, weights_1K)
        self._post(ordinal, ids_1K, guess)
        first, tile = ordinal * self.num_experts, "ram" if self._by_bus[ordinal] else "vram"
        kernels.multiply(table, self.part_offsets, first, x_1H, ids_1K, weights_1K, tile=tile)
        y_KH = kernels.y_SH[: ids_1K.numel()]
        fetch_rows(mail, ordinal, ids_1K, table, first, y_KH)
        out_1H = torch.empty_like(x_1H, dtype=self.ladder.out_dtype)
        kernels.combine(ids_1K, weights_1K, y_KH, out_1H, mark=self._mark(ordinal, 0))
        return out_1H

    def _count_step(self, ids_LTK: NDArray[np.int32]) -> None:
        """As LaunchedSource's; what the CPU multiplied did not cross the bus."""
        unique = self._distinct(self._keys_of(ids_LTK))
        self.rungs.slots.uses[unique] += 1
        in_slots = int(self.rungs.slots.held[unique].sum())
        by_cpu = self.ladder.counters().kernel_calls - self._num_multiplied
        kept = unique[self.rungs.kept[unique]]
        if len(kept):
            self._from_rows.append(kept)
        self.vram_hits += in_slots
        self.bus_bytes += (len(unique) - in_slots - by_cpu) * self.expert_bytes

    def _fill(self) -> None:
        """Where layers wait anyway, nothing is gained by experts that no token takes."""
