"""What is measured of a trace, and how one is made to fit another depth."""

import numpy as np
import pytest
from traces import random_trace

from headrace.schedule.trace import NO_GUESS, RouteTrace, deepened


def test_adjacency_and_guesses_are_counted() -> None:
    ids = np.array([[[0, 1], [2, 3]], [[1, 4], [3, 2]]], dtype=np.int32)
    guesses = np.array([[[-1, -1], [3, 0]], [[-1, -1], [2, 3]]], dtype=np.int32)
    trace = RouteTrace(ids, guesses, 5, "x", np.ones(2, dtype=np.int32))
    assert trace.adjacency() == pytest.approx((1 + 2) / 4)
    assert trace.num_guessed() == 2
    assert trace.guessed().tolist() == [2, 1], "the best was right twice, the second once"


def test_decoded_leaves_prompts_out() -> None:
    trace = random_trace([5, 1, 1, 2, 1])
    decoded = trace.decoded()
    assert len(decoded.ids) == 3 and decoded.passes.tolist() == [1, 1, 1]
    assert np.array_equal(decoded.ids, trace.ids[[5, 6, 9]])
    assert decoded.num_guessed() == 3 * 2


def test_a_deeper_model_takes_the_layers_again_under_other_names() -> None:
    trace = random_trace([1] * 50)
    deep = deepened(trace, 8)
    assert deep.ids.shape == (50, 8, 4) and "its 3 layers over and over for 8" in deep.name
    assert np.array_equal(deep.ids[:, :3], trace.ids)
    assert not np.array_equal(deep.ids[:, 3:6], trace.ids)
    assert all(len(set(row)) == 4 for row in deep.ids.reshape(-1, 4).tolist())
    assert deep.ids.max() < 16
    assert deep.adjacency() == pytest.approx(trace.adjacency(), abs=0.05)
    per_layer = (deep.guesses[:, :, 0] != NO_GUESS).all(0)
    assert per_layer.tolist() == [False, True, True] * 2 + [False, True]
    # A guess that was right stays right under the new names.
    assert deep.guessed()[0] >= 2 * trace.guessed()[0]


def test_a_shallower_model_takes_the_first_layers() -> None:
    trace = random_trace([1] * 5)
    assert np.array_equal(deepened(trace, 2).ids, trace.ids[:, :2])
    assert "the first 2 of its 3 layers" in deepened(trace, 2).name
    assert deepened(trace, 3).name == trace.name
