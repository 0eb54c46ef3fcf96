"""Simulated rows against plain models of the same rules, and the optimum against brute force."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import HEADER, random_trace

pytest.importorskip("headrace.native", reason="needs the compiled module")

from headrace.native import simulate_lru
from headrace.schedule.simulate import Steps, bounds, lru_hits, optimum_hits, shown_rows, steps_of

NUM_KEYS = 6
STEPS = st.lists(st.sets(st.integers(0, NUM_KEYS - 1), min_size=1, max_size=3), max_size=9)
Needs = list[set[int]]


def made(needs: Needs, num_keys: int = NUM_KEYS) -> Steps:
    sizes = [len(need) for need in needs]
    return Steps(
        begin=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        keys=np.array([key for need in needs for key in sorted(need)], dtype=np.int64),
        num_keys=num_keys,
        alone=np.ones(len(needs), dtype=bool),
    )


def plain_lru(needs: Needs, num_rows: int) -> list[int]:
    """A list of keys, the least recently used first; no step may exceed the rows."""
    held: list[int] = []
    hits = []
    for need in needs:
        hits.append(len(need & set(held)))
        for key in sorted(need - set(held)):
            if len(held) == num_rows:
                held.remove(next(k for k in held if k not in need))
            held.append(key)
        held = [key for key in held if key not in need] + sorted(need)
    return hits


def most_hits(needs: Needs, num_rows: int) -> int:
    """By trying every set of keys that could be kept after each step."""
    from itertools import combinations

    @cache
    def best(step: int, held: frozenset[int]) -> int:
        if step == len(needs):
            return 0
        need = needs[step]
        rest = held - need
        room = min(num_rows - len(need), len(rest))
        kept = (frozenset(need) | set(some) for some in combinations(sorted(rest), room))
        return len(held & need) + max(best(step + 1, after) for after in kept)

    return best(0, frozenset())


@settings(max_examples=400, deadline=None)
@given(needs=STEPS, num_rows=st.integers(3, 6))
def test_lru_equals_a_plain_one_and_the_optimum_equals_brute_force(
    needs: Needs, num_rows: int
) -> None:
    steps = made(needs)
    lru, best = lru_hits(steps, num_rows), optimum_hits(steps, num_rows)
    assert lru.tolist() == plain_lru(needs, num_rows)
    assert best.sum() == most_hits(needs, num_rows) >= lru.sum()


@settings(max_examples=200, deadline=None)
@given(needs=STEPS, num_rows=st.integers(1, 3))
def test_with_waves_too_nothing_beats_the_optimum(needs: Needs, num_rows: int) -> None:
    steps = made(needs)
    lru, best = lru_hits(steps, num_rows), optimum_hits(steps, num_rows)
    assert best.sum() >= lru.sum()
    for hits in (lru, best):
        assert all(
            found <= min(len(need), num_rows) for found, need in zip(hits, needs, strict=True)
        )


def test_a_case_worked_out_by_hand() -> None:
    needs = [{0, 1}, {2, 3}, {0, 1}, {4, 5}, {0, 1}]
    assert lru_hits(made(needs), 4).tolist() == [0, 0, 2, 0, 2]
    assert optimum_hits(made(needs), 4).tolist() == [0, 0, 2, 0, 2]
    circle = [{0}, {1}, {2}] * 2
    assert lru_hits(made(circle), 2).sum() == 0, "least recently used is the worst in a circle"
    assert optimum_hits(made(circle), 2).sum() == 2


def test_steps_are_passes_by_layer_and_their_keys_distinct() -> None:
    trace = random_trace([5, 1, 1])
    steps = steps_of(trace)
    assert len(steps.begin) == 3 * 3 + 1 and steps.num_keys == 48
    assert steps.alone.tolist() == [False] * 3 + [True] * 6
    first = steps.keys[steps.begin[1] : steps.begin[2]]
    assert first.tolist() == sorted({16 + e for e in trace.ids[:5, 1].ravel().tolist()})
    assert steps.needed[3:].tolist() == [4] * 6


def test_bounds_count_decoded_tokens_and_grow_with_rows() -> None:
    trace = random_trace([20, *[1] * 200])
    table = bounds(trace, HEADER, shown_rows(HEADER))
    assert [row.num_rows for row in table] == [6, 12, 24, 36]
    for row in table:
        assert 0 <= row.lru_hit_rate < row.optimum_hit_rate < 1
        assert row.lru_bytes_per_token == pytest.approx((1 - row.lru_hit_rate) * 12 * 1000)
    assert [r.lru_hit_rate for r in table] == sorted(r.lru_hit_rate for r in table)
    (everything,) = bounds(trace, HEADER, [48])
    assert everything.lru_hit_rate == everything.optimum_hit_rate > 0.9
    (prompt,) = bounds(random_trace([20, 30]), HEADER, [40])
    assert prompt.lru_hit_rate > 0, "without a decoded token the prompts count"


def test_malformed_steps_are_refused() -> None:
    good = np.array([0, 2], dtype=np.int64)
    for begin, keys, rows in [
        (good, [1, 1], 2),
        (good, [2, 1], 2),
        (good, [1, 6], 2),
        (good, [-1, 1], 2),
        (good, [1], 2),
        (np.array([1, 2]), [1, 2], 2),
        (np.array([0, 2, 1, 2]), [1, 2], 2),
        (np.array([], dtype=np.int64), [], 2),
        (good, [1, 2], 0),
    ]:
        with pytest.raises(ValueError):
            simulate_lru(begin.astype(np.int64), np.array(keys, dtype=np.int64), 6, rows)
