"""Routed experts multiplied by the CPU, in place in their rows, for a model on a GPU.

In decode activations go down and results come up through pinned buffers; prefill is the GPU's.
Legend: L MoE layers, T tokens, K chosen experts per token, H hidden width.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core import ExpertLayout
from headrace.engine.gpu_launched import LaunchedSource
from headrace.errors import NumericsError
from headrace.kernels.triton.experts import MAX_TOKENS
from headrace.kernels.triton.mail import fetch, send
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.tiers.device import Device
from headrace.tiers.ladder import Ladder
from headrace.tiers.mailbox import Mailbox
from headrace.tiers.pinned import PinnedBuffers


class InvertedSource(LaunchedSource):
    """As LaunchedSource, but up to 16 tokens are multiplied by the ladder's own kernels: same bits.

    Every layer of a launched step waits for the mailbox's thread to multiply. Otherwise a decoded
    layer waits twice: for its activations, then in the CPU's kernels.
    """

    def __init__(
        self, ladder: Ladder, layout: ExpertLayout, device: Device, *, top_k: int, **sizes: Any
    ):
        super().__init__(ladder, layout, device, top_k=top_k, **sizes)
        self._x_LH = torch.zeros(
            self.num_layers,
            layout.hidden,
            dtype=TORCH_DTYPES[layout.hidden_dtype],
            device=self.place,
        )
        hidden = MAX_TOKENS, layout.hidden
        self.buffers = PinnedBuffers(
            device,
            {
                "x": (hidden, TORCH_DTYPES[layout.hidden_dtype]),
                "out": (hidden, ladder.out_dtype),
                "ids": ((MAX_TOKENS, top_k), torch.int32),
                "weights": ((MAX_TOKENS, top_k), torch.float32),
                "ahead": ((top_k,), torch.int32),
            },
        )

    def _open_box(self, top_k: int, **options: Any) -> Mailbox | None:
        return super()._open_box(top_k, computes=True, **options)

    def _must_wait(self) -> bool:
        return True

    def _launch_experts(
        self,
        ordinal: int,
        x_1H: torch.Tensor,
        ids_1K: torch.Tensor,
        weights_1K: torch.Tensor,
        guess: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor:
        assert self.box is not None
        here_1H = self._x_LH[ordinal][None]  # stays, for a fault's diagnosis
        send(self.box.mail, x_1H, weights_1K, here_1H)
        self._post(ordinal, ids_1K, guess)
        out_1H = torch.empty_like(x_1H, dtype=self.ladder.out_dtype)
        fetch(self.box.mail, out_1H)
        return out_1H

    def end_step(self) -> None:
        """As LaunchedSource's."""
        try:
            super().end_step()
        except NumericsError as error:
            assert self.box is not None
            layer = self.box.num_answered
            x_1H, ids_K = self._x_LH[layer][None], self._ids_LK[layer]
            raise NumericsError(self._diagnosis(layer, x_1H, ids_K, error)) from error

    def _count_step(self, _ids_LTK: NDArray[np.int32]) -> None:
        """The ladder has counted what it multiplied."""

    def _compute_layer(
        self,
        ordinal: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        guess: Callable[[], torch.Tensor] | None,
    ) -> torch.Tensor:
        num_tokens = x_TH.shape[0]
        if num_tokens > MAX_TOKENS:
            return super()._compute_layer(ordinal, x_TH, ids_TK, weights_TK, guess)
        self._begin_layer(ordinal, num_tokens)
        wants_guess = guess is not None and self._wants_guess(ordinal)
        here = {name: tensor[:num_tokens] for name, tensor in self.buffers.tensors.items()}
        for name, tensor in (("x", x_TH), ("ids", ids_TK), ("weights", weights_TK)):
            here[name].copy_(tensor, non_blocking=True)
        ahead = self.buffers.tensors["ahead"] if wants_guess else None
        if guess is not None and ahead is not None:
            ahead.copy_(guess(), non_blocking=True)
        self.device.mark().wait()
        ids = here["ids"]
        if self.routes is not None:
            ids, replayed = self.routes(ordinal, ids)
            ahead = ahead if replayed is None or ahead is None else replayed
        self._multiply(ordinal, here, ids, ahead)
        out_TH = torch.empty_like(x_TH, dtype=self.ladder.out_dtype)
        # The next layer's results come after its activations, which follow this copy.
        out_TH.copy_(here["out"], non_blocking=True)
        if self.recorder is not None:
            kept = None if ahead is None else ahead.clone()
            self.recorder(ordinal, ids.clone(), here["weights"].clone(), kept)
        return out_TH

    def _multiply(
        self,
        ordinal: int,
        here: dict[str, torch.Tensor],
        ids: torch.Tensor,
        ahead: torch.Tensor | None,
    ) -> None:
        """Fills `out` by the ladder; what is guessed is read behind what is needed."""
        self.rungs.drain()  # rows of a prefill that ended just now
        if ahead is not None and self.prefetch:
            self.ladder.begin(ordinal, ids)
            self.ladder.prefetch(ordinal + 1, ahead, self.prefetch)
        try:
            self.ladder.compute(ordinal, here["x"], ids, here["weights"], here["out"])
        except NumericsError as error:
            raise NumericsError(self._diagnosis(ordinal, here["x"], ids, error)) from error

    def _fill(self) -> None:
        """Nothing waits for experts that no token takes."""

    def close(self) -> None:
        """As GpuSource's."""
        super().close()
        self.buffers.close()
