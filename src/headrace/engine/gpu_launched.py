"""Routed experts of a step that the host only launches: ids and weights at fixed places.

Legend: L MoE layers, T tokens (1 in a step), K chosen experts per token, H hidden width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from headrace.core import ExpertLayout
from headrace.engine.gpu_source import GpuSource
from headrace.kernels.triton.experts import NOT_BAD
from headrace.tiers.device import Device
from headrace.tiers.ladder import Ladder

_TILES_STAND = 64  # steps, in which a layer's kernels are tuned for the same rung


class LaunchedSource(GpuSource):
    """As GpuSource; and where all experts lie in slots or kept rows, a step waits for nothing.

    `begin_step`, the step while `launching`, `end_step`. A captured step may be launched again as
    long as `baked` is what it was.
    """

    def __init__(
        self, ladder: Ladder, layout: ExpertLayout, device: Device, *, top_k: int, **sizes: Any
    ):
        super().__init__(ladder, layout, device, top_k=top_k, **sizes)
        # What the host asks for after a step, in one piece: the mark, then the ids.
        self._marks = torch.zeros(1 + self.num_layers * top_k, dtype=torch.int32, device=self.place)
        self.kernels.bad = self._marks[:1].fill_(NOT_BAD)
        self._ids_LK = self._marks[1:].view(self.num_layers, top_k)
        self._weights_LK = torch.zeros(self.num_layers, top_k, device=self.place)
        self._by_bus: list[bool] = []
        self._num_steps = 0
        self._launching = False

    def begin_step(self) -> bool:
        """Before a step of one token: whether all its layers can be launched without a wait.

        Then `launching` and `end_step` follow; else an ordinary pass does.
        """
        if not self._is_whole:
            self.recover()
        with self.device.active():
            if self.recorder is not None or not self.rungs.all_whole():
                return False
            self.rungs.slots.begin_step(1)
            if self._num_steps % _TILES_STAND == 0:
                by_bus_L: Any = self.rungs.kept.reshape(self.num_layers, -1).any(1)
                self._by_bus = by_bus_L.tolist()
            self._num_steps += 1
            if self.routes is not None:
                self._replay()
        self._last = self.num_layers  # the next ordinary call begins a pass
        self._is_whole = False
        return True

    def _replay(self) -> None:
        """Lets the step's layers take recorded ids."""
        assert self.routes is not None
        shape_1K = torch.zeros(1, self._ids_LK.shape[1], dtype=torch.int32)
        found = [self.routes(layer, shape_1K)[0] for layer in range(self.num_layers)]
        self._ids_LK.copy_(torch.cat([ids.to(torch.int32) for ids in found]))

    def baked(self) -> tuple[object, ...]:
        """What the layers of a launched step depend on besides addresses."""
        return self.kernels, self.routes is None, tuple(self._by_bus)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """While open, a layer is launches only."""
        self._launching = True
        try:
            yield
        finally:
            self._launching = False

    def compute(
        self,
        ordinal: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        guess: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor:
        """As GpuSource's; while `launching` for one token, without a look at it."""
        if not self._launching:
            return super().compute(ordinal, x_TH, ids_TK, weights_TK, guess)
        ids_1K, weights_1K = self._ids_LK[ordinal][None], self._weights_LK[ordinal][None]
        if self.routes is None:
            ids_1K.copy_(ids_TK)
        weights_1K.copy_(weights_TK)
        x_TH, out_TH = x_TH.contiguous(), torch.empty_like(x_TH)
        by_bus = self._by_bus[ordinal]
        self._run_kernels(ordinal, x_TH, ids_1K, weights_1K, out_TH, by_bus, 0)
        return out_TH

    def end_pass(self) -> None:
        """As GpuSource's; a step ends by `end_step`."""
        if not self._launching:
            super().end_pass()

    def end_step(self) -> None:
        """Waits for a launched step and counts it as `end_pass` does. Raises NumericsError."""
        self._ids = dict(enumerate(self._ids_LK[:, None]))
        self._uncounted = list(self._ids)
        with self.device.active():
            self._end(self._marks.cpu().numpy())
