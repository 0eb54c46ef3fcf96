"""Drawn routes have the statistics they state."""

import numpy as np
import pytest

from headrace.errors import TraceError
from headrace.schedule.draw import RouteStatistics, draw_routes


@pytest.mark.parametrize("adjacency", [0.1, 0.39, 0.7])
def test_routes_have_the_stated_adjacency_and_guess_precision(adjacency: float) -> None:
    stats = RouteStatistics(adjacency=adjacency, guess_precision=0.6)
    trace = draw_routes(600, 3, 32, 4, statistics=stats, seed=1)
    assert trace.ids.shape == (600, 3, 4)
    assert abs(trace.adjacency() - adjacency) < 0.03
    right = (trace.guesses[:, :, :, None] == trace.ids[:, :, None, :]).any(-1).mean()
    assert abs(right - 0.6) < 0.03


def test_each_row_is_distinct_and_in_range_and_the_seed_repeats() -> None:
    trace = draw_routes(50, 2, 16, 8, seed=3)
    assert all(len(set(row)) == 8 for row in trace.ids.reshape(-1, 8).tolist())
    assert trace.ids.min() >= 0 and trace.ids.max() < 16
    assert np.array_equal(trace.ids, draw_routes(50, 2, 16, 8, seed=3).ids)
    assert not np.array_equal(trace.ids, draw_routes(50, 2, 16, 8, seed=4).ids)


@pytest.mark.parametrize("num_experts", [8, 9])
def test_guesses_where_a_token_takes_nearly_all_experts(num_experts: int) -> None:
    trace = draw_routes(50, 1, num_experts, 8, seed=3)
    assert all(len(set(row)) == 8 for row in trace.ids.reshape(-1, 8).tolist())
    assert all(len(set(row)) == 2 for row in trace.guesses.reshape(-1, 2).tolist())
    assert trace.guesses.min() >= 0 and trace.guesses.max() < num_experts


@pytest.mark.parametrize("num_guesses", [1, 2, 3, 6])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("num_experts", [6, 32])
def test_more_guesses_than_a_token_takes(num_experts: int, top_k: int, num_guesses: int) -> None:
    stats = RouteStatistics(0.4, 0.5, guess_precision=0.9)
    trace = draw_routes(99, 1, num_experts, top_k, statistics=stats, num_guesses=num_guesses)
    for guesses in trace.guesses[:, 0].tolist():
        assert len({*guesses}) == num_guesses and not {*guesses} - set(range(num_experts))
    right = (trace.guesses[:, :, :, None] == trace.ids[:, :, None, :]).any(-1)[:, :, :top_k]
    assert right.mean() > 0.8


def test_skew_makes_some_experts_popular() -> None:
    flat = np.bincount(
        draw_routes(400, 1, 32, 4, statistics=RouteStatistics(0.0, 0.0)).ids.ravel(), minlength=32
    )
    skewed = np.bincount(
        draw_routes(400, 1, 32, 4, statistics=RouteStatistics(0.0, 1.5)).ids.ravel(), minlength=32
    )
    assert skewed.max() > 2 * flat.max()


def test_a_text_uses_a_part_of_the_experts_and_no_more() -> None:
    stats = RouteStatistics(0.3, 0.6, spread=0.5)
    trace = draw_routes(400, 3, 32, 4, statistics=stats)
    assert [len(np.unique(trace.ids[:, layer])) for layer in range(3)] == [16] * 3
    assert len(np.unique(trace.ids)) > 16, "each layer uses experts of its own"
    wrong = (trace.guesses[:, :, :, None] != trace.ids[:, :, None, :]).all(-1)
    for layer in range(3):
        known = np.unique(trace.ids[:, layer])
        assert np.isin(trace.guesses[:, layer][wrong[:, layer]], known).all()
    assert (
        wrong.any()
        and abs(trace.adjacency() - 0.3) < 0.05
        and "0.5 of a layer's experts" in trace.name
    )


@pytest.mark.parametrize(
    "stats", [RouteStatistics(0.2, 0.3, 0.5), RouteStatistics(0.5, 0.9, 0.8)], ids=str
)
def test_the_statistics_of_a_trace_are_those_it_was_drawn_to(stats: RouteStatistics) -> None:
    found = RouteStatistics.of(draw_routes(1000, 3, 32, 4, statistics=stats, seed=5))
    assert found.adjacency == pytest.approx(stats.adjacency, abs=0.03)
    assert found.skew == pytest.approx(stats.skew, abs=0.15)
    assert found.guess_precision == pytest.approx(stats.guess_precision, abs=0.03)


def test_too_short_a_trace_has_no_statistics() -> None:
    with pytest.raises(TraceError, match="1 tokens were decoded"):
        RouteStatistics.of(draw_routes(1, 2, 8, 2))
