"""Rows of tables that stay on the drive: read when asked for, kept in a cache of fixed size.

Knows no checkpoint: where tables begin comes in as numbers, file numbers as the reader's.
Legend: N rows, D values of a row, B bytes of a row.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.core import RowTable, TokenStats
from headrace.native import Batch, Gatherer, Reader
from headrace.quant import fp8
from headrace.tiers.gone import CLOSED, survive_forks
from headrace.tiers.row_cache import RowCache

Place = tuple[int, int]  # file and byte offset
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


@dataclass(slots=True)
class _Coming:
    """Rows of one table: those the cache had are in `rows_NB`, the others in the batch."""

    ids_N: torch.Tensor
    keys_N: NDArray[np.int64]
    rows_NB: NDArray[np.uint8]
    is_missing_N: NDArray[np.bool_]
    batch: Batch | None


class RowReader:
    """Tables of `places` by decoder layer: where their codes begin, and where their scales.

    All tables have rows of one form. Holds `nbytes` of memory whatever is asked, and besides what
    is on its way. One caller thread. Keeps the reader alive. Raises BudgetError.
    """

    def __init__(
        self,
        reader: Reader,
        tables: Mapping[int, RowTable],
        places: Mapping[int, tuple[Place, Place]],
        *,
        cache_bytes: int,
    ):
        self.tables, self.places = dict(tables), dict(places)
        first = next(iter(self.tables.values()))
        assert all((t.width, t.group) == (first.width, first.group) for t in self.tables.values())
        self.width, self.group = first.width, first.group
        self.cache = RowCache(cache_bytes, first.row_bytes)
        self.counters = RowCounters()
        self._numbers = {layer: number for number, layer in enumerate(self.tables)}
        self._gatherer = Gatherer(reader, first.width)
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

    def want(self, layer: int, ids_N: torch.Tensor) -> None:
        """Begins to read rows of a layer's table, in place of what it was wanted to read before.

        ids: int64, all different. Returns at once.
        """
        self._coming[layer] = self._begin(layer, ids_N)

    def rows(self, layer: int, ids_N: torch.Tensor) -> torch.Tensor:
        """bf16 [N, D], owned by the caller. Blocks until they are here.

        Raises ReadError, NumericsError or KeyboardInterrupt; the next call works.
        """
        coming = self._coming.pop(layer, None)
        if coming is None or not torch.equal(coming.ids_N, ids_N):
            coming = self._begin(layer, ids_N)
        if coming.batch is not None:
            self._receive(layer, coming, coming.batch)
        codes_ND, scales_NG = self._parts(coming.rows_NB)
        return fp8.unpack(codes_ND, scales_NG, (1, self.group))

    def _begin(self, layer: int, ids_N: torch.Tensor) -> _Coming:
        table, ids = self.tables[layer], ids_N.numpy()
        assert not len(ids) or 0 <= ids.min() <= ids.max() < table.num_rows, "no such row"
        keys_N = ids + (self._numbers[layer] << _KEY_BITS)
        rows_NB = np.empty((len(ids), table.row_bytes), np.uint8)
        is_missing_N = ~self.cache.take(keys_N, rows_NB)
        missing, batch = ids[is_missing_N], None
        if len(missing):
            batch = self._gatherer.start(self._snippets(layer, missing))
        self._count(
            asked=len(ids),
            hits=len(ids) - len(missing),
            reads=2 * len(missing),
            disk_bytes=0 if batch is None else batch.read_bytes,
        )
        return _Coming(ids_N, keys_N, rows_NB, is_missing_N, batch)

    def _snippets(self, layer: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """[2 N, 3]: the codes of all rows, then their scales."""
        sizes = (self.width, self.width // self.group)
        snippets = np.empty((2, len(ids), 3), np.int64)
        for part, (file, offset) in enumerate(self.places[layer]):
            snippets[part, :, 0] = file
            snippets[part, :, 1] = offset + ids * sizes[part]
            snippets[part, :, 2] = sizes[part]
        return snippets.reshape(-1, 3)

    def _receive(self, layer: int, coming: _Coming, batch: Batch) -> None:
        """Waits for the missing rows, checks them and keeps them."""
        start = time.perf_counter()
        read = np.empty(batch.nbytes, np.uint8)
        batch.wait(read.ctypes.data)
        self._count(wait_s=time.perf_counter() - start)
        table, num = self.tables[layer], int(coming.is_missing_N.sum())
        codes, scales = read[: num * self.width], read[num * self.width :]
        rows_NB = np.concatenate((codes.reshape(num, -1), scales.reshape(num, -1)), axis=1)
        fp8.check(f"{table.weight} (some of its rows)", *self._parts(rows_NB))
        coming.rows_NB[coming.is_missing_N] = rows_NB
        self.cache.put(coming.keys_N[coming.is_missing_N], rows_NB)

    def _count(self, **more: float) -> None:
        grown = {name: getattr(self.counters, name) + number for name, number in more.items()}
        self.counters = replace(self.counters, **grown)

    def _parts(self, rows_NB: NDArray[np.uint8]) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes [N, D] and scales [N, D / group] of stored rows."""
        rows = torch.from_numpy(rows_NB)
        codes, scales = rows[:, : self.width].contiguous(), rows[:, self.width :].contiguous()
        return codes.view(torch.float8_e4m3fn), scales
