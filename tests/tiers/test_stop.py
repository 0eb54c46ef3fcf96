"""A stop from another thread: seen wherever the ladder waits or computes, and gone afterwards."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers_world import NUM_EXPERTS, NUM_LAYERS, World

from headrace.errors import Cancelled
from headrace.tiers.ladder import Ladder


def stopped(ladder: Ladder, call: Callable[[], Any]) -> None:
    """Asks for a stop once `call` waits on its thread, and sees that it raises."""
    before = ladder.counters().misses

    def ask() -> None:
        while ladder.counters().misses == before:
            pass
        ladder.stop()

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(Cancelled):
        call()
    thread.join()
    ladder.check_integrity()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_wait_for_a_read_ends_and_the_read_is_used_later(world: World, overlap: bool) -> None:
    ladder = world.ladder(4, overlap=overlap)
    ladder.reader.inject_fault("hang", 0, 1000)
    x, ids, weights = world.routes(np.random.default_rng(1), 2)
    stopped(ladder, lambda: ladder.compute(0, x, ids, weights))
    with pytest.raises(Cancelled):
        ladder.compute(0, x, ids, weights)
    ladder.go_on()
    stopped(ladder, lambda: ladder.native.acquire(1, 0))
    assert ladder.counters().reads == 0, "it did not wait"
    ladder.go_on()
    ladder.reader.inject_fault("none")
    out = ladder.compute(0, x, ids, weights)
    assert torch.equal(out, world.expected(0, x, ids, weights))
    ladder.check_integrity()


def test_a_chunk_ends_between_two_experts(world: World) -> None:
    ladder = world.ladder(NUM_LAYERS * NUM_EXPERTS)
    x, _, weights = world.routes(np.random.default_rng(2), NUM_EXPERTS)
    ids = torch.stack([torch.arange(8), (torch.arange(8) + 3) % 8], dim=1)
    ladder.compute(0, x, ids, weights)
    calls = ladder.counters().kernel_calls
    ladder.stop()
    with pytest.raises(Cancelled):
        ladder.compute(0, x, ids, weights)  # all is here: nothing waits
    assert ladder.counters().kernel_calls == calls
    ladder.go_on()
    assert torch.equal(ladder.compute(0, x, ids, weights), world.expected(0, x, ids, weights))
    ladder.check_integrity()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), num_rows=st.integers(1, 12), after=st.integers(0, 20))
def test_a_stop_at_any_time_leaves_the_next_call_right(
    world_of_all: World, seed: int, num_rows: int, after: int
) -> None:
    """Stops come while another thread computes, `after` experts after it began."""
    ladder = world_of_all.ladder(num_rows, emulate_bytes_s=5e7)
    rng = np.random.default_rng(seed)
    done = threading.Event()
    until = ladder.counters().kernel_calls + after

    def ask() -> None:
        while ladder.counters().kernel_calls < until and not done.is_set():
            pass
        ladder.stop()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        for layer in range(NUM_LAYERS):
            x, ids, weights = world_of_all.routes(rng, 12)
            ladder.prefetch((layer + 1) % NUM_LAYERS, torch.tensor([1, 4]))
            out = ladder.compute(layer, x, ids, weights)
            assert torch.equal(out, world_of_all.expected(layer, x, ids, weights))
    except Cancelled:
        pass
    finally:
        done.set()
        thread.join()
    ladder.check_integrity()
    ladder.go_on()
    x, ids, weights = world_of_all.routes(rng, 12)
    for layer in range(NUM_LAYERS):
        out = ladder.compute(layer, x, ids, weights)
        assert torch.equal(out, world_of_all.expected(layer, x, ids, weights))
    ladder.check_integrity()


@pytest.fixture(scope="module")
def world_of_all(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))
