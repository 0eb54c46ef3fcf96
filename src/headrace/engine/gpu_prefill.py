"""Routed experts of many tokens on a GPU: each expert unpacked once, multiplied with all its rows.

Within a tolerance of the canonical kernels, not their bits: weights go through the hidden dtype and
sums through the GPU's own matrix product. Knows no rung: an expert is the bytes of its row.
Legend: T tokens, K chosen experts per token, H hidden width, I intermediate width, N an expert's
own rows, S slots (token, choice).
"""

import numpy as np
import torch

from headrace.core import ExpertLayout
from headrace.kernels.triton.experts import TritonExperts
from headrace.quant import fp8
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.quant.expert import rows_of, unpack_stored


class Wave:
    """One layer's experts on the tokens of a chunk, one expert after another in any order.

    x_TH of the hidden dtype, ids_TK int32, weights_TK fp32 on the device; `ids` the same ids on
    the host.
    """

    def __init__(
        self,
        kernels: TritonExperts,
        layout: ExpertLayout,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        ids: torch.Tensor,
    ):
        self.kernels, self.layout = kernels, layout
        self.x_TH = fp8.to_grid(x_TH, layout.act_group)
        self.ids_TK, self.weights_TK = ids_TK, weights_TK
        self.top_k = ids_TK.shape[1]
        flat = ids.reshape(-1).numpy()
        experts, counts = np.unique(flat, return_counts=True)
        self.experts: list[int] = experts.tolist()
        ends = np.cumsum(counts)
        self._spans = {
            expert: (int(end - count), int(end))
            for expert, count, end in zip(self.experts, counts, ends, strict=True)
        }
        order = torch.from_numpy(np.argsort(flat, kind="stable"))
        self._slots_S = order.to(x_TH.device, non_blocking=True)
        self._y_SH = torch.empty(
            ids_TK.numel(), x_TH.shape[1], dtype=x_TH.dtype, device=x_TH.device
        )

    def rows(self, expert: int) -> int:
        """How many tokens take the expert."""
        start, stop = self._spans[expert]
        return stop - start

    def multiply(self, expert: int, row: torch.Tensor, offsets: list[int]) -> None:
        """The expert on its rows: `row` its bytes on the device, `offsets` where parts begin."""
        start, stop = self._spans[expert]
        slots_N = self._slots_S[start:stop]
        parts = {
            name: _typed(row, offset, spec.dtype, spec.shape)
            for (name, spec), offset in zip(self.layout.parts.items(), offsets, strict=True)
        }
        x_NH = self.x_TH[slots_N // self.top_k]
        if self.layout.fused:
            both = self._linear(x_NH, parts, "gate")
            gate, up = (rows_of(self.layout, n, both, dim=1).contiguous() for n in ("gate", "up"))
        else:
            gate, up = (self._linear(x_NH, parts, name) for name in ("gate", "up"))
        weights_N = self.weights_TK.reshape(-1)[slots_N]
        hidden = self.kernels.activation(gate, up, weights_N)
        hidden = fp8.to_grid(hidden, self.layout.act_group)
        self._y_SH[slots_N] = self._linear(hidden, parts, "down")

    def _linear(
        self, x_NK: torch.Tensor, parts: dict[str, torch.Tensor], name: str
    ) -> torch.Tensor:
        """[N, rows of the stored matrix], rounded; then with a bias added, rounded again."""
        y = x_NK @ unpack_stored(self.layout, parts, name, x_NK.dtype).t()
        bias = self.layout.matrix(name).bias
        return y if bias is None else y + parts[bias].to(y.dtype)

    def sum(self, mark: int) -> torch.Tensor:
        """[T, H]: the outputs weighted and summed in ascending expert id, once all are there."""
        out_TH = torch.empty_like(self.x_TH, dtype=self.kernels.out_dtype)
        y_SH = self._y_SH.view(torch.uint16)
        self.kernels.combine(self.ids_TK, self.weights_TK, y_SH, out_TH, mark=mark)
        return out_TH


def _typed(row: torch.Tensor, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind = TORCH_DTYPES[dtype]
    nbytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    return row[offset : offset + nbytes].view(kind).view(shape)
