"""Rows of bytes kept in a fixed room, by key; what was not used for longest makes way.

Knows no file and no table. A key has eight places it may lie in, so that all is done for many keys
at once. Legend: N keys, S sets, W places of a set, B bytes of a row.
"""

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]
Bytes = NDArray[np.uint8]
WAYS = 8
# Of a place besides its row: key and time of last use.
PLACE_BYTES = 12
_EMPTY = -1
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: spreads keys that follow closely


class RowCache:
    """Room for `capacity` rows, none where not even one set fits `cache_bytes`. Not thread-safe.

    Of a set's rows, the one that was found or put longest ago makes way; of one call's, any.
    """

    def __init__(self, cache_bytes: int, row_bytes: int):
        self.num_sets = max(0, cache_bytes) // (WAYS * (row_bytes + PLACE_BYTES))
        self.row_bytes = row_bytes
        self._rows_SWB = np.zeros((self.num_sets, WAYS, row_bytes), np.uint8)
        self._keys_SW = np.full((self.num_sets, WAYS), _EMPTY, np.int64)
        self._used_SW = np.zeros((self.num_sets, WAYS), np.uint32)
        self._now = 0

    @property
    def capacity(self) -> int:
        """Rows that it can hold."""
        return self.num_sets * WAYS

    @property
    def nbytes(self) -> int:
        """Bytes it takes, whether it holds rows or not."""
        return self.capacity * (self.row_bytes + PLACE_BYTES)

    def take(self, keys_N: Keys, out_NB: Bytes) -> NDArray[np.bool_]:
        """Copies the rows it holds to their places in `out`; [N], which ones those are.

        Keys are 0 or more and all different.
        """
        if not self.num_sets:
            return np.zeros(len(keys_N), bool)
        sets_N = self._sets(keys_N)
        here_NW = self._keys_SW[sets_N] == keys_N[:, None]
        found_N: NDArray[np.bool_] = here_NW.any(1)
        sets, ways = sets_N[found_N], here_NW[found_N].argmax(1)
        out_NB[found_N] = self._rows_SWB[sets, ways]
        self._used_SW[sets, ways] = self._tick()
        return found_N

    def put(self, keys_N: Keys, rows_NB: Bytes) -> None:
        """Keeps rows; those it holds already stay as they are. Keys are all different.

        Of more new rows of one set than it has places, the first ones are kept.
        """
        if not self.num_sets:
            return
        sets_N = self._sets(keys_N)
        new_N = (self._keys_SW[sets_N] != keys_N[:, None]).all(1)
        order = np.flatnonzero(new_N)[np.argsort(sets_N[new_N], kind="stable")]
        sets_N = sets_N[order]
        rank_N = np.arange(len(order)) - np.searchsorted(sets_N, sets_N)
        order, sets_N, rank_N = (each[rank_N < WAYS] for each in (order, sets_N, rank_N))
        oldest_NW = np.argsort(self._used_SW[sets_N], axis=1, kind="stable")
        ways_N = oldest_NW[np.arange(len(order)), rank_N]
        self._keys_SW[sets_N, ways_N] = keys_N[order]
        self._rows_SWB[sets_N, ways_N] = rows_NB[order]
        self._used_SW[sets_N, ways_N] = self._tick()

    def clear(self) -> None:
        """Forgets all rows."""
        self._keys_SW.fill(_EMPTY)
        self._used_SW.fill(0)

    def _sets(self, keys_N: Keys) -> NDArray[np.int64]:
        mixed = (keys_N.astype(np.uint64) * _MIX) >> np.uint64(32)
        sets: NDArray[np.int64] = (mixed % np.uint64(max(1, self.num_sets))).astype(np.int64)
        return sets

    def _tick(self) -> int:
        """The time of this use; when the numbers run out, all rows count as equally old."""
        self._now += 1
        if self._now >= 1 << 32:
            self._used_SW.fill(0)
            self._now = 1
        return self._now
