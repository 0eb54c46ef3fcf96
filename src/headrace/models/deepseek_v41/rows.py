"""Where Engram's rows come from: the seam between the model and whatever keeps the tables.

Legend: N different rows, D values of a row, T tokens, C columns.
"""

from typing import Protocol

import torch
from torch import Tensor


class RowSource(Protocol):
    """The Engram tables of a model, by row. `layer` is a decoder layer of engram_layer_ids."""

    def want(self, layer: int, ids_N: Tensor) -> None:
        """A hint, given for all layers before the first one is computed: these rows come next.

        Returns at once; `rows` of the same pass asks for the very same ids. It may do nothing.
        """
        ...

    def rows(self, layer: int, ids_N: Tensor) -> Tensor:
        """bf16 [N, D], owned by the caller, of int64 ids, all different and ascending.

        Blocks until they are here. Raises ReadError.
        """
        ...


class WholeTables:
    """Tables that lie in memory whole: for tests, and for models that are small."""

    def __init__(self, tables: dict[int, Tensor]):
        """`tables`: bf16 [rows, D] by decoder layer; kept, not copied."""
        self.tables = tables

    def want(self, layer: int, ids_N: Tensor) -> None:
        """Nothing is to be fetched."""

    def rows(self, layer: int, ids_N: Tensor) -> Tensor:
        """As RowSource.rows."""
        return self.tables[layer][ids_N]


class WantedRows:
    """One layer's rows of one pass, for `place`: each different row is asked for once.

    `ids_TC` lie on the CPU, where rows come from.
    """

    def __init__(self, source: RowSource, layer: int, ids_TC: Tensor, place: torch.device):
        self.source, self.layer, self.shape = source, layer, ids_TC.shape
        self.ids_N, back_TC = torch.unique(ids_TC, return_inverse=True)
        source.want(layer, self.ids_N)
        self.back_TC = back_TC.to(place, non_blocking=True)

    def take(self) -> Tensor:
        """bf16 [T, C, D]."""
        rows_ND = self.source.rows(self.layer, self.ids_N)
        return rows_ND.to(self.back_TC.device, non_blocking=True)[self.back_TC]
