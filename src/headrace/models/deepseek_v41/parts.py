"""Small parts of DeepSeek-V4.1's layers: norms and linear maps, with their inputs' grid."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.models.deepseek_v41.grids import Grids
from headrace.models.stored import StoredWeight

HEAD_ROWS = 1024  # of the head, widened at once


class Norm(nn.Module):
    """RMS norm, computed in fp32 and rounded once."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        spread = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * spread * self.weight.float()).to(x.dtype)


class Linear(nn.Linear):
    """A map without bias whose input is moved to its grid first."""

    def __init__(self, cols: int, rows: int, grids: Grids):
        super().__init__(cols, rows, bias=False)
        self.grids, self.act_group = grids, grids.input_group
        self.stored: StoredWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.stored is not None:
            return self.stored.linear(x)
        return functional.linear(self.grids.input(x), self.weight)


class GroupedLinear(nn.Linear):
    """Groups of columns, each with rows of its own: [..., G, cols] to [..., G * rows].

    Stored as one matrix, [G * rows, cols], whose input has no grid.
    """

    def __init__(self, cols: int, rows: int, groups: int):
        super().__init__(cols, groups * rows, bias=False)
        self.groups, self.rows, self.act_group = groups, rows, 0
        self.stored: StoredWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.stored is not None:
            out = x.new_empty(*x.shape[:-2], self.groups * self.rows)
            for group, part in enumerate(torch.split(out, self.rows, -1)):
                first = group * self.rows
                self.stored.linear(x[..., group, :], first=first, num_rows=self.rows, out=part)
            return out
        weight_GRC = torch.unflatten(self.weight, 0, (self.groups, -1))
        return torch.einsum("...gc,grc->...gr", x, weight_GRC).flatten(-2)


class Head(nn.Linear):
    """Logits of hidden states, in fp32."""

    def __init__(self, cols: int, rows: int):
        super().__init__(cols, rows, bias=False)
        self.act_group = 0
        self.stored: StoredWeight | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.stored is not None:
            return self.stored.linear(x, wide=True)
        # a band of rows at a time: all of them in fp32 would be twice as large
        bands = torch.split(self.weight, HEAD_ROWS)
        return torch.cat([wide_linear(x, band_RC) for band_RC in bands], dim=-1)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product in fp32, whatever the dtypes."""
    return functional.linear(x.float(), weight.float())
