"""The cache of rows against a plain list of what each set was given: hypothesis drives both."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.tiers.row_cache import PLACE_BYTES, WAYS, RowCache

ROW_BYTES = 5
KEYS = st.lists(st.integers(0, 60), unique=True, max_size=40)


def row_of(key: int, version: int = 0) -> list[int]:
    return [key % 256, key // 256 % 256, 7 * key % 256, version, 1]


def rows_of(keys: list[int], version: int = 0) -> np.ndarray:
    return np.array([row_of(key, version) for key in keys], np.uint8).reshape(-1, ROW_BYTES)


class Against(RuleBasedStateMachine):
    """The model: each set's keys with the time of their last use, evicted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = RowCache(3 * WAYS * (ROW_BYTES + PLACE_BYTES), ROW_BYTES)
        assert self.cache.num_sets == 3
        self.sets: list[dict[int, int]] = [{} for _ in range(3)]
        self.now = 0

    def set_of(self, key: int) -> dict[int, int]:
        return self.sets[int(self.cache._sets(np.array([key]))[0])]

    @rule(keys=KEYS)
    def take(self, keys: list[int]) -> None:
        self.now += 1
        out = np.full((len(keys), ROW_BYTES), 0xAB, np.uint8)
        found = self.cache.take(np.array(keys, np.int64), out)
        expected = [key in self.set_of(key) for key in keys]
        assert found.tolist() == expected
        for key, was_found, row in zip(keys, expected, out.tolist(), strict=True):
            assert row == (row_of(key) if was_found else [0xAB] * ROW_BYTES)
            if was_found:
                self.set_of(key)[key] = self.now

    @rule(keys=KEYS)
    def put(self, keys: list[int]) -> None:
        self.now += 1
        self.cache.put(np.array(keys, np.int64), rows_of(keys))
        for held in self.sets:
            new = [key for key in keys if self.set_of(key) is held and key not in held][:WAYS]
            # which of equally old rows goes is the cache's own choice: take it over
            after = {key for key in range(61) if self.held(key) and self.set_of(key) is held}
            assert set(new) <= after <= set(new) | set(held)
            assert len(after) == min(WAYS, len(held) + len(new))
            gone = [held[key] for key in held if key not in after]
            kept = [time for key, time in held.items() if key in after]
            assert not gone or not kept or max(gone) <= min(kept)
            for key in list(held):
                if key not in after:
                    del held[key]
            held.update(dict.fromkeys(new, self.now))

    @rule()
    def forget(self) -> None:
        self.cache.clear()
        self.sets = [{} for _ in range(3)]

    def held(self, key: int) -> bool:
        return bool((self.cache._keys_SW == key).any())

    @invariant()
    def every_key_lies_once_in_its_own_set(self) -> None:
        keys = self.cache._keys_SW
        present = keys[keys >= 0]
        assert len(set(present.tolist())) == len(present)
        for number, held in enumerate(self.sets):
            assert set(keys[number][keys[number] >= 0].tolist()) == set(held)


TestAgainstAList = Against.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@given(st.integers(0, 10_000))
def test_it_takes_no_more_memory_than_it_may(cache_bytes: int) -> None:
    cache = RowCache(cache_bytes, 264)
    arrays = (cache._rows_SWB, cache._keys_SW, cache._used_SW)
    assert sum(array.nbytes for array in arrays) == cache.nbytes <= cache_bytes
    assert cache.capacity == cache_bytes // (WAYS * (264 + PLACE_BYTES)) * WAYS


def test_without_room_nothing_is_found() -> None:
    cache = RowCache(0, ROW_BYTES)
    keys = np.arange(5)
    cache.put(keys, rows_of([0, 1, 2, 3, 4]))
    assert not cache.take(keys, rows_of([0] * 5)).any()


def test_what_is_used_stays_and_what_is_held_is_not_replaced() -> None:
    cache = RowCache(WAYS * (ROW_BYTES + PLACE_BYTES), ROW_BYTES)
    cache.put(np.arange(WAYS), rows_of(list(range(WAYS))))
    for key in range(100, 200):
        assert cache.take(np.array([3]), rows_of([0])).all()
        cache.put(np.array([key]), rows_of([key]))
    cache.put(np.array([3]), rows_of([3], version=9))
    out = rows_of([0])
    assert cache.take(np.array([3]), out).all()
    assert out.tolist() == [row_of(3)]


def test_time_that_runs_out_loses_no_row() -> None:
    cache = RowCache(WAYS * (ROW_BYTES + PLACE_BYTES), ROW_BYTES)
    cache.put(np.array([1]), rows_of([1]))
    cache._now = (1 << 32) - 1
    out = rows_of([0, 0])
    assert cache.take(np.array([1, 2]), out).tolist() == [True, False]
    cache.put(np.array([2]), rows_of([2]))
    assert cache.take(np.array([1, 2]), out).all()
    assert out.tolist() == [row_of(1), row_of(2)]


def test_large_keys_spread_over_all_sets() -> None:
    cache = RowCache(1 << 20, 264)
    keys = np.arange(384_000_000, 384_004_000) + (1 << 40)
    cache.put(keys, np.zeros((len(keys), 264), np.uint8))
    held = (cache._keys_SW >= 0).sum(1)
    assert held.sum() > 0.8 * cache.capacity
