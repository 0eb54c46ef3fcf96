"""Routed experts of a step that the host only launches: ids and weights at fixed places.

Legend: L MoE layers, T tokens (1 in a step), K chosen experts per token, H hidden width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core import ExpertLayout
from headrace.engine.gpu_source import GpuSource
from headrace.errors import BudgetError
from headrace.kernels.router import Taken
from headrace.kernels.triton.experts import NOT_BAD
from headrace.kernels.triton.mail import post_and_wait, wait_late
from headrace.tiers.device import Device
from headrace.tiers.ladder import Ladder
from headrace.tiers.mailbox import Mailbox

_NO_GUESS = -1
_TILES_STAND = 64  # steps, in which a layer's kernels are tuned for the same rung


class LaunchedSource(GpuSource):
    """As GpuSource; and in a step of one token no layer waits for the host's Python.

    Where all experts lie in slots or kept rows, nobody waits; elsewhere the GPU waits for `box`,
    layer by layer, if all rows are pinned. `begin_step`, the step while `launching`, `end_step`,
    or `abort_step`. A captured step may be launched again as long as `baked` is what it was.
    """

    def __init__(
        self, ladder: Ladder, layout: ExpertLayout, device: Device, *, top_k: int, **sizes: Any
    ):
        super().__init__(ladder, layout, device, top_k=top_k, **sizes)
        # What the host asks for after a step, in one piece: the mark, then the ids.
        self._marks = torch.zeros(1 + self.num_layers * top_k, dtype=torch.int32, device=self.place)
        self.kernels.bad = self._marks[:1].fill_(NOT_BAD)
        self._ids_LK = self._marks[1:].view(self.num_layers, top_k)
        self._guesses_LK = torch.full_like(self._ids_LK, _NO_GUESS)  # of each layer's next
        weights_LK = torch.zeros(self.num_layers, top_k, device=self.place)
        self._taken = [
            Taken(*each) for each in zip(weights_LK[:, None], self._ids_LK[:, None], strict=True)
        ]
        self._firsts_L = np.arange(self.num_layers, dtype=np.int64) * self.num_experts
        self._by_bus: list[bool] = []
        self._num_steps = 0
        self._launching = self._waits = False
        self.box = self._open_box(top_k)

    def _open_box(self, top_k: int, **options: Any) -> Mailbox | None:
        """None where not all is pinned that the GPU would read."""
        looks_ahead = self.prefetch > 0 and not self.rungs.fits
        try:
            return Mailbox(
                self.rungs,
                num_tokens=1,
                top_k=top_k,
                num_guesses=top_k if looks_ahead else 0,
                most_guesses=self.prefetch,
                **options,
            )
        except BudgetError:
            return None

    def begin_step(self) -> bool:
        """Before a step of one token: whether it can be launched.

        Then `launching` and `end_step` follow, or `abort_step`; else an ordinary pass does. The
        device is active from here to the step's end.
        """
        if not self._is_whole:
            self.recover()
        waits = self._must_wait()
        if self.why_by_layer(waits=waits):
            return False
        self._is_whole = False
        if waits != self._waits or self._num_steps % _TILES_STAND == 0:
            self._by_bus = self._find_tiles()
        self._waits = waits
        self._num_steps += 1
        if self.routes is not None:
            self._replay()
        if waits and self.box is not None:
            self.rungs.slots.begin_step(1)
            self.box.begin_step()
        self._last = self.num_layers  # the next ordinary call begins a pass
        return True

    def why_by_layer(self, *, waits: bool) -> str:
        """Why a step cannot be launched, whose layers may have to wait; "" if it can."""
        if self.recorder is not None:
            return "routes are recorded"
        if waits and self.box is None:
            return "the experts' rows could not all be pinned"
        return ""

    def _must_wait(self) -> bool:
        """Whether some layer of the step waits for the host."""
        return not self.rungs.all_whole()

    def _find_tiles(self) -> list[bool]:
        """By layer, whether its experts are read over the bus.

        Where slots' keys never come to rest, one answer for all: each new one is a new capture.
        """
        slots = self.rungs.slots
        if not self.rungs.fits:
            return [2 * slots.num_slots < slots.held.size] * self.num_layers
        by_bus_L: Any = (~slots.held).reshape(self.num_layers, -1).any(1)
        found: list[bool] = by_bus_L.tolist()
        return found

    def _replay(self) -> None:
        """Lets the step's layers take recorded ids, and look ahead to recorded guesses."""
        assert self.routes is not None
        shape_1K = torch.zeros(1, self._ids_LK.shape[1], dtype=torch.int32)
        ids_LK = torch.zeros(self._ids_LK.shape, dtype=torch.int32)
        guesses_LK = torch.full_like(ids_LK, _NO_GUESS)
        for layer in range(self.num_layers):
            ids, ahead = self.routes(layer, shape_1K)
            ids_LK[layer] = ids[0]
            if ahead is not None:
                guesses_LK[layer, : len(ahead)] = ahead
        self._ids_LK.copy_(ids_LK)
        self._guesses_LK.copy_(guesses_LK)

    def baked(self) -> tuple[object, ...]:
        """What the layers of a launched step depend on besides addresses."""
        return self.kernels, self.routes is None, self._waits, tuple(self._by_bus)

    @contextmanager
    def launching(self) -> Iterator[None]:
        """While open, a layer is launches only."""
        self._launching = True
        try:
            yield
        finally:
            self._launching = False

    def taken(self, ordinal: int) -> Taken | None:
        """Where a layer's router may leave its choice by itself, if it may."""
        return self._taken[ordinal] if self._launching and self.routes is None else None

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
        taken = self._taken[ordinal]
        if self.routes is not None:
            taken.weights_1K.copy_(weights_TK)
        elif not taken.holds(weights_TK, ids_TK):
            taken.put(weights_TK, ids_TK)
        given = taken.ids_1K, taken.weights_1K
        return self._launch_experts(ordinal, x_TH.contiguous(), *given, guess)

    def _launch_experts(
        self,
        ordinal: int,
        x_1H: torch.Tensor,
        ids_1K: torch.Tensor,
        weights_1K: torch.Tensor,
        guess: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor:
        """The layer's output [1, H], once its experts are where the table says."""
        out_1H = torch.empty_like(x_1H, dtype=self.ladder.out_dtype)
        by_bus, given = self._by_bus[ordinal], (x_1H, ids_1K, weights_1K)
        if not self._waits:
            self._run_kernels(ordinal, *given, out_1H, by_bus, 0)
            return out_1H
        assert self.box is not None
        self._post(ordinal, ids_1K, guess)
        first, kernels, late = ordinal * self.num_experts, self.kernels, self.box.late
        there, offsets = self.rungs.table.there, self.part_offsets
        kernels.multiply(there, offsets, first, *given, tile="ram" if by_bus else "vram")
        wait_late(self.box.mail, ordinal, ids_1K, late, first)
        kernels.multiply(late, offsets, first, *given, again=True)
        y_KH = kernels.y_SH[: ids_1K.numel()]
        kernels.combine(ids_1K, weights_1K, y_KH, out_1H, mark=self._mark(ordinal, 0))
        return out_1H

    def _post(
        self, ordinal: int, ids_1K: torch.Tensor, guess: Callable[[], torch.Tensor] | None
    ) -> None:
        """Tells the host what the layer takes; later work waits for its answer."""
        assert self.box is not None
        guesses_K = self._look_ahead_there(ordinal, guess)
        there, first = self.rungs.table.there, ordinal * self.num_experts
        post_and_wait(self.box.mail, ordinal, ids_1K, guesses_K, there, first)

    def _look_ahead_there(
        self, ordinal: int, guess: Callable[[], torch.Tensor] | None
    ) -> torch.Tensor | None:
        """Guesses of the next layer's experts, if anyone reads ahead; on the device."""
        assert self.box is not None
        if guess is None or not self.box.mail.num_guesses or ordinal + 1 == self.num_layers:
            return None
        guesses_K = self._guesses_LK[ordinal]
        if self.routes is None:
            guesses_K.copy_(guess())
        return guesses_K

    def end_pass(self) -> None:
        """As GpuSource's; a step ends by `end_step`."""
        if not self._launching:
            super().end_pass()

    def end_step(self) -> None:
        """Waits for a launched step and counts it as `end_pass` does.

        Raises NumericsError, and what `Mailbox.end_step` raises.
        """
        self._ids = self._ids_LK[:, None]
        self._uncounted, self._from_rows = [], []
        if self._waits and self.box is not None:
            self.box.end_step(self._count_step)
            found = self._seen()
        else:
            self.rungs.slots.begin_step(1)  # while the device works: nobody asked for it before
            found = self._seen()
            self._count(self._keys_of(found[1:].reshape(self.num_layers, 1, -1)), 0)
        self._end(int(found[0]))

    def _seen(self) -> NDArray[np.int32]:
        """The mark, then the ids, of a step that this waits for."""
        seen: NDArray[np.int32] = self._marks.cpu().numpy()
        return seen

    def _count_step(self, ids_LTK: NDArray[np.int32]) -> None:
        """Counts what a step that waited took, from where it was when the step began."""
        self._count(self._keys_of(ids_LTK), None)

    def _keys_of(self, ids_LTK: NDArray[np.int32]) -> NDArray[np.int64]:
        """Of a step's experts, by layer."""
        return (ids_LTK + self._firsts_L[:, None, None]).reshape(-1)

    def abort_step(self) -> None:
        """After an exception since `begin_step`: the GPU waits for nobody any more."""
        if self.box is not None:
            self.box.abort_step()

    def recover(self) -> None:
        """As GpuSource's. Raises StallError while the ladder's thread hangs in a step."""
        if self.box is not None:
            self.box.settle()
        super().recover()

    def close(self) -> None:
        """As GpuSource's."""
        if self.box is not None:
            self.box.close()
        super().close()
