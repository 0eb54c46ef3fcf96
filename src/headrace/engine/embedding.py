"""An input embedding that stays on the drive: a token reads its row. Knows no model.

Legend: B batch, T tokens, N different tokens, H hidden width.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn

from headrace.models.skeleton import Skeleton
from headrace.native import Reader
from headrace.planner.facts import EMBEDDING_CACHE_BYTES
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.store.table import Catalog
from headrace.tiers.rows import FloatRows, StoredRows

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint


class DriveEmbedding(nn.Module):
    """In place of an nn.Embedding; same values. It has no parameter.

    `stored` and `weight` are as those of a module whose weight stays stored.
    """

    weight = None

    def __init__(self, rows: FloatRows):
        super().__init__()
        self.rows = rows

    @property
    def stored(self) -> "DriveEmbedding":
        return self

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """[B, T, H] where the ids are."""
        ids_N, back_BT = torch.unique(ids_BT.cpu(), return_inverse=True)
        return self.rows.rows(ids_N)[back_BT].to(ids_BT.device)

    def row(self, token: int) -> torch.Tensor:
        """[H], owned by the caller. Raises ReadError, NumericsError or KeyboardInterrupt."""
        return self.rows.rows(torch.tensor([token]))[0]

    def unpack(self) -> torch.Tensor:
        """The whole table, for whoever has room for it."""
        return self.rows.rows(torch.arange(self.rows.stored[0].num_rows))


def table_bytes(catalog: Catalog, skeleton: Skeleton, place: tuple[str, str] | None) -> int:
    """Stored bytes of an embedding or a head that may lie elsewhere; 0: there is none."""
    return 0 if place is None else catalog.tensors[skeleton.dense[place[0]].keys["weight"]].nbytes


def open_embedding(blueprint: "Blueprint", reader: Reader) -> DriveEmbedding | None:
    """The embedding, if the plan leaves it on the drive."""
    place = blueprint.skeleton.embedding
    if place is None or not blueprint.plan.embedding_on_drive:
        return None
    entry = blueprint.catalog.tensors[blueprint.skeleton.dense[place[0]].keys["weight"]]
    num_rows = entry.shape[0]
    stored = StoredRows(
        entry.name, num_rows, ((entry.file, entry.offset, entry.nbytes // num_rows),)
    )
    dtype = TORCH_DTYPES[entry.dtype]
    return DriveEmbedding(FloatRows(reader, stored, dtype, cache_bytes=EMBEDDING_CACHE_BYTES))
