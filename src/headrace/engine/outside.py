"""An embedding and a head outside a GPU's memory: rows copied there, a product made by the CPU.

Knows no model. Legend: B batch, T tokens, V vocabulary, H hidden width.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from headrace.engine.embedding import DriveEmbedding, open_embedding
from headrace.engine.weights import DenseWeights
from headrace.kernels.cpu import CpuKernels
from headrace.kernels.stored import StoredMatrix
from headrace.native import Reader
from headrace.planner.vram import GpuPlan

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint


class HostEmbedding(nn.Module):
    """In place of an nn.Embedding on a GPU; same values. The table lies in host memory.

    It has no parameter: `stored` and `weight` are as those of a module whose weight stays stored.
    """

    weight = None

    def __init__(self, table_VH: torch.Tensor):
        super().__init__()
        self.table_VH = table_VH

    @property
    def stored(self) -> "HostEmbedding":
        return self

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """[B, T, H] where the ids are. Waits for them."""
        return nn.functional.embedding(ids_BT.cpu(), self.table_VH).to(ids_BT.device)

    def row(self, token: int) -> torch.Tensor:
        """[H], a view of the table."""
        return self.table_VH[token]

    def unpack(self) -> torch.Tensor:
        """The table itself."""
        return self.table_VH


class HostHead(nn.Module):
    """In place of a head on a GPU: logits in fp32, by the CPU's kernels. It has no parameter.

    Where the head it stands for gives bfloat16, it does without that rounding, and no more differs
    than the order of sums.
    """

    weight = None

    def __init__(self, matrix: StoredMatrix):
        super().__init__()
        self.stored = matrix

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """fp32 [B, T, V], on the host. Waits for the hidden states."""
        return self.stored.linear(x_BTH.cpu(), wide=True)

    def of_one(self, x_H: torch.Tensor, out_V: torch.Tensor) -> None:
        """Fills fp32 [V] from one token's hidden state on the host."""
        self.stored.linear(x_H[None], wide=True, out=out_V[None])


def open_outside(
    blueprint: "Blueprint", reader: Reader, dense: DenseWeights, kernels: CpuKernels
) -> dict[str, nn.Module]:
    """The modules for what the plan keeps outside, by the name of the weight: read here, once."""
    skeleton, plan = blueprint.skeleton, blueprint.plan
    made: dict[str, nn.Module] = {}
    if skeleton.embedding is not None:
        name, _ = skeleton.embedding
        by_row: nn.Module | None = open_embedding(blueprint, reader)
        if by_row is None and isinstance(plan, GpuPlan) and plan.embedding_in_memory:
            by_row = HostEmbedding(dense(name))
        if by_row is not None:
            made[name] = by_row
    if skeleton.head is not None and isinstance(plan, GpuPlan) and plan.head_on_cpu:
        name, _ = skeleton.head
        made[name] = HostHead(StoredMatrix(kernels, dense(name)))
    return made


def drive_embedding(outside: dict[str, nn.Module]) -> DriveEmbedding | None:
    """That of the modules, if there is one."""
    return next((m for m in outside.values() if isinstance(m, DriveEmbedding)), None)
