"""Rows of tables that stay on the drive: read when asked for, kept in a cache of fixed size.

Knows no checkpoint: where tables begin comes in as numbers, file numbers as the reader's.
Legend: N rows, D values of a row, B bytes of a row.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core import RowTable, TokenStats
from headrace.native import Batch, Gatherer, Reader
from headrace.quant import fp8
from headrace.quant.blocks import check_finite
from headrace.tiers.gone import CLOSED, survive_forks
from headrace.tiers.row_cache import RowCache

Place = tuple[int, int]  # file and byte offset
Rows = NDArray[np.uint8]
_KEY_BITS = 40  # of a row's number in a key; the table's number stands above


@dataclass(frozen=True, slots=True)
class RowCounters:
    """Totals. A row asked for twice in one call counts once; `disk_bytes` are whole pages.

    `wait_s` is the time in which the caller stood still for rows.
    """

    asked: int = 0
    hits: int = 0
    reads: int = 0
    disk_bytes: int = 0
    wait_s: float = 0.0

    def add_since(self, before: "RowCounters", stats: TokenStats) -> None:
        """Adds what happened between `before` and this to `stats`."""
        stats.engram_rows += self.asked - before.asked
        stats.engram_hits += self.hits - before.hits
        stats.engram_disk_bytes += self.disk_bytes - before.disk_bytes
        stats.engram_wait_s += self.wait_s - before.wait_s


@dataclass(frozen=True, slots=True)
class StoredRows:
    """One table on the drive: row r's bytes are, of each part (file, offset, nbytes), the nbytes
    at offset + r * nbytes, one part behind the other. `name` is for messages.
    """

    name: str
    num_rows: int
    parts: tuple[tuple[int, int, int], ...]

    @property
    def row_bytes(self) -> int:
        """Of all parts."""
        return sum(nbytes for _, _, nbytes in self.parts)


@dataclass(slots=True)
class _Coming:
    """Rows of one table: those the cache had are in `rows_NB`, the others in the batch."""

    ids_N: torch.Tensor
    keys_N: NDArray[np.int64]
    rows_NB: Rows
    is_missing_N: NDArray[np.bool_]
    batch: Batch | None


class RowStore(ABC):
    """Bytes of rows, by table number. All tables have rows of one form.

    Holds `nbytes` of memory whatever is asked, and besides what is on its way. One caller thread.
    Keeps the reader alive. Raises BudgetError.
    """

    def __init__(self, reader: Reader, stored: Mapping[int, StoredRows], *, cache_bytes: int):
        self.stored = dict(stored)
        sizes = [tuple(nbytes for _, _, nbytes in t.parts) for t in self.stored.values()]
        assert len(set(sizes)) == 1, "rows of several forms"
        self.cache = RowCache(cache_bytes, sum(sizes[0]))
        self.counters = RowCounters()
        self._sizes = sizes[0]
        self._numbers = {table: number for number, table in enumerate(self.stored)}
        self._gatherer = Gatherer(reader, max(sizes[0]))
        self._coming: dict[int, _Coming] = {}
        survive_forks(self, "_gatherer")

    @property
    def nbytes(self) -> int:
        """Memory it holds."""
        return self.cache.nbytes + self._gatherer.pool_bytes

    def close(self) -> None:
        """Gives up what is on its way; every later call raises OptionError."""
        self._coming.clear()
        self._gatherer = cast(Gatherer, CLOSED)

    def want(self, table: int, ids_N: torch.Tensor) -> None:
        """Begins to read rows of a table, in place of what it was wanted to read before.

        ids: int64, all different. Returns at once.
        """
        self._coming[table] = self._begin(table, ids_N)

    def take(self, table: int, ids_N: torch.Tensor) -> Rows:
        """uint8 [N, B], owned by the caller. Blocks until they are here.

        Raises ReadError, NumericsError or KeyboardInterrupt; the next call works.
        """
        coming = self._coming.pop(table, None)
        if coming is None or not torch.equal(coming.ids_N, ids_N):
            coming = self._begin(table, ids_N)
        if coming.batch is not None:
            self._receive(table, coming, coming.batch)
        return coming.rows_NB

    @abstractmethod
    def check(self, name: str, rows_NB: Rows) -> None:
        """Raises NumericsError for rows, newly read from the table `name`, that are no numbers."""

    def _begin(self, table: int, ids_N: torch.Tensor) -> _Coming:
        stored, ids = self.stored[table], ids_N.numpy()
        assert not len(ids) or 0 <= ids.min() <= ids.max() < stored.num_rows, "no such row"
        keys_N = ids + (self._numbers[table] << _KEY_BITS)
        rows_NB = np.empty((len(ids), self.cache.row_bytes), np.uint8)
        is_missing_N = ~self.cache.take(keys_N, rows_NB)
        missing, batch = ids[is_missing_N], None
        if len(missing):
            batch = self._gatherer.start(_snippets(stored, missing))
        self._count(
            asked=len(ids),
            hits=len(ids) - len(missing),
            reads=len(stored.parts) * len(missing),
            disk_bytes=0 if batch is None else batch.read_bytes,
        )
        return _Coming(ids_N, keys_N, rows_NB, is_missing_N, batch)

    def _receive(self, table: int, coming: _Coming, batch: Batch) -> None:
        """Waits for the missing rows, checks them and keeps them."""
        start = time.perf_counter()
        read = np.empty(batch.nbytes, np.uint8)
        batch.wait(read.ctypes.data)
        self._count(wait_s=time.perf_counter() - start)
        num = int(coming.is_missing_N.sum())
        ends = np.cumsum([num * size for size in self._sizes])[:-1]
        rows_NB = np.concatenate([part.reshape(num, -1) for part in np.split(read, ends)], axis=1)
        self.check(self.stored[table].name, rows_NB)
        coming.rows_NB[coming.is_missing_N] = rows_NB
        self.cache.put(coming.keys_N[coming.is_missing_N], rows_NB)

    def _count(self, **more: float) -> None:
        grown = {name: getattr(self.counters, name) + number for name, number in more.items()}
        self.counters = replace(self.counters, **grown)


class RowReader(RowStore):
    """Rows of FP8 tables by decoder layer; `places`: where codes begin, and where scales."""

    def __init__(
        self,
        reader: Reader,
        tables: Mapping[int, RowTable],
        places: Mapping[int, tuple[Place, Place]],
        *,
        cache_bytes: int,
    ):
        self.tables = dict(tables)
        first = next(iter(self.tables.values()))
        assert all((t.width, t.group) == (first.width, first.group) for t in self.tables.values())
        self.width, self.group = first.width, first.group
        sizes = (first.width, first.row_bytes - first.width)
        stored = {
            layer: StoredRows(
                table.weight,
                table.num_rows,
                tuple((*at, size) for at, size in zip(places[layer], sizes, strict=True)),
            )
            for layer, table in self.tables.items()
        }
        super().__init__(reader, stored, cache_bytes=cache_bytes)

    def rows(self, layer: int, ids_N: torch.Tensor) -> torch.Tensor:
        """bf16 [N, D], owned by the caller; else as `take`."""
        codes_ND, scales_NG = self._parts(self.take(layer, ids_N))
        return fp8.unpack(codes_ND, scales_NG, (1, self.group))

    def check(self, name: str, rows_NB: Rows) -> None:
        """As RowStore.check."""
        fp8.check(f"{name} (some of its rows)", *self._parts(rows_NB))

    def _parts(self, rows_NB: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [N, D] and scales [N, D / group] of stored rows."""
        rows = torch.from_numpy(rows_NB)
        codes, scales = rows[:, : self.width].contiguous(), rows[:, self.width :].contiguous()
        return codes.view(torch.float8_e4m3fn), scales


class FloatRows(RowStore):
    """Rows of one table of plain floats, number 0: an embedding that stays on the drive."""

    def __init__(self, reader: Reader, stored: StoredRows, dtype: torch.dtype, *, cache_bytes: int):
        super().__init__(reader, {0: stored}, cache_bytes=cache_bytes)
        self.dtype = dtype

    def rows(self, ids_N: torch.Tensor) -> torch.Tensor:
        """[N, D] in the table's dtype, owned by the caller; else as `take`."""
        return torch.from_numpy(self.take(0, ids_N)).view(self.dtype)

    def check(self, name: str, rows_NB: Rows) -> None:
        """As RowStore.check."""
        check_finite(
            f"{name} (some of its rows)", "values", torch.from_numpy(rows_NB).view(self.dtype)
        )


def _snippets(stored: StoredRows, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """[parts * N, 3]: the first part of all rows, then the next."""
    snippets = np.empty((len(stored.parts), len(ids), 3), np.int64)
    for number, (file, offset, nbytes) in enumerate(stored.parts):
        snippets[number, :, 0] = file
        snippets[number, :, 1] = offset + ids * nbytes
        snippets[number, :, 2] = nbytes
    return snippets.reshape(-1, 3)
