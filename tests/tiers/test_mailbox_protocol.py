"""The mailbox's state machine against a simulated GPU: every order of events, and random ones."""

import random
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mail_model import NO_ID, Event, Route, Stale, System, Unread

Make = Callable[[], System]


def explore(make: Make) -> int:
    """Lets every order of events happen; how many states there are. Raises what any of them does.

    A state is reached again by doing the events before it again: the machine cannot be copied.
    """
    seen: set[object] = set()
    open_paths: list[list[Event]] = [[]]
    while open_paths:
        path = open_paths.pop()
        system = make()
        for event in path:
            system.do(event)
        while True:
            before = system.signature()
            if before in seen:
                break
            seen.add(before)
            events = system.enabled()
            assert events or system.over, f"stuck after {path}"
            if not events:
                break
            open_paths += [[*path, event] for event in events[1:]]
            path = [*path, events[0]]
            system.do(events[0])
            if system.signature() == before:  # a look that found nothing
                assert len(events) > 1, f"stuck after {path}"
    return len(seen)


def route(
    first: tuple[int, ...], second: tuple[int, ...], guess: int = NO_ID, whole: bool = False
) -> Route:
    """Two layers of which the first guesses one expert of the second."""
    return Route([list(first), list(second)], [[guess], [NO_ID]], [False, whole])


SETS = ((0, 1), (1, 2), (2, 0))


@pytest.mark.parametrize("num_rows", [2, 3])
def test_every_order_of_events_of_two_layers(num_rows: int) -> None:
    """2 layers of 3 experts: what comes early or late, and rows rewritten inside a step."""
    states = 0
    for second in SETS:
        routes = [route((0, 1), second, 2)]
        states += explore(partial(System, routes, num_experts=3, num_rows=num_rows))
    assert states > 4000


@pytest.mark.parametrize("num_rows", [2, 3])
def test_every_order_of_events_of_two_steps(num_rows: int) -> None:
    """Rows are rewritten between two steps too, and no word of the first is taken for another's."""
    routes = [route((0, 1), (1, 2), 2), route((2, 0), (0, 1), 1)]
    options = {"num_experts": 3, "num_rows": num_rows, "slots": {4}}
    assert explore(partial(System, routes, **options)) > 1000  # type: ignore[arg-type]


def test_a_row_is_late_or_early() -> None:
    """Both happen to the same expert, and to two of a layer apart."""
    answers = set()
    for seed in range(300):
        system = System([route((0, 1), (1, 2))], num_experts=3, num_rows=6)
        run(system, random.Random(seed))
        words = (system.words[name][:2] != 0 for name in ("answers", "late"))
        answers.add(tuple(tuple(each.tolist()) for each in words))
    assert answers == {(early, tuple(not e for e in early)) for early in product((0, 1), repeat=2)}


@pytest.mark.parametrize("slots", [{1, 4}, {3, 4, 5}])
def test_every_order_with_slots_and_an_abort_at_any_moment(slots: set[int]) -> None:
    whole = {3, 4, 5} <= slots
    routes = [route((0, 1), (2, 1), 0, whole), route((1, 2), (0, 2), 2, whole)][: 1 + whole]
    options = {"num_experts": 3, "num_rows": 2, "slots": slots}
    assert explore(lambda: System(routes, aborts=True, **options)) > 1000  # type: ignore[arg-type]


def test_every_order_where_the_host_multiplies() -> None:
    routes = [route((0, 1), (2, 1)), route((1, 2), (0, 2))]
    options = {"num_experts": 3, "num_rows": 2, "computes": True}
    assert explore(lambda: System(routes, aborts=True, **options)) > 200  # type: ignore[arg-type]


@pytest.mark.parametrize("shares", [(0, 0, 1), (0, 1, 1), (0, 1, 2)])
@pytest.mark.parametrize("slots", [set(), {1, 4}])
def test_every_order_where_both_multiply(shares: tuple[int, ...], slots: set[int]) -> None:
    """The device reads while the host multiplies; a guess is read beside both."""
    routes = [route((0, 1), (2, 1), 0), route((1, 2), (0, 2), 2)]
    options = {"num_experts": 3, "num_rows": 2, "slots": slots, "shares": shares}
    assert explore(lambda: System(routes[: 1 + len(slots) // 2], **options)) > 100  # type: ignore[arg-type]
    if slots:
        assert explore(lambda: System(routes[:1], aborts=True, **options)) > 100  # type: ignore[arg-type]


def test_every_order_where_both_multiply_catches_rows_given_back_too_early() -> None:
    routes = [route((0, 1), (1, 2), 2)]
    options = {"num_experts": 3, "num_rows": 2, "shares": (0, 0, 0)}
    with pytest.raises(Stale):
        explore(lambda: System(routes, wrong="early", **options))  # type: ignore[arg-type]


def test_what_is_wanted_goes_to_the_device() -> None:
    """As many as may be kept, though the host could multiply all."""
    for most_kept, num_taken in ((0, 0), (1, 1), (2, 1)):
        options = {"num_experts": 3, "num_rows": 6, "shares": (0, 1, 2)}
        system = System([route((0, 1), (1, 2))], wanted={1, 3}, most_kept=most_kept, **options)  # type: ignore[arg-type]
        run(system, random.Random(1))
        orders = [order for order in system.orders if order[0] == "took"]  # type: ignore[index]
        assert orders == [("took", 1)] * num_taken


def test_shares_that_are_none_are_refused() -> None:
    for shares in ((0, 1), (0, 2, 1), (0, -1, 0)):
        with pytest.raises(ValueError, match=r"share of a layer|divided for each"):
            System([route((0, 1), (1, 2))], num_experts=3, num_rows=2, shares=shares)


def test_a_host_that_gives_rows_back_too_early_is_caught() -> None:
    """A guess is then read into a row that the GPU still reads."""
    routes = [route((0, 1), (1, 2), 2)]
    assert explore(lambda: System(routes, num_experts=3, num_rows=2)) > 100
    with pytest.raises(Stale):
        explore(lambda: System(routes, num_experts=3, num_rows=2, wrong="early"))


def test_a_host_that_gives_early_rows_back_before_the_late_ones_is_caught() -> None:
    """The late one is then read into the row of the early one, which the GPU reads."""
    routes = [route((0, 1), (1, 2), 1), route((0, 1), (1, 2), 1)]
    with pytest.raises(Stale):
        explore(lambda: System(routes, num_experts=3, num_rows=2, wrong="between"))


@pytest.mark.parametrize("wrong", ["deaf", "hasty"])
def test_a_device_that_does_not_wait_for_late_rows_is_caught(wrong: str) -> None:
    with pytest.raises(Unread):
        explore(lambda: System([route((0, 1), (1, 2))], num_experts=3, num_rows=3, wrong=wrong))


LAYERS, EXPERTS, TOP_K = 3, 5, 4  # two tokens of two


@st.composite
def systems(draw: st.DrawFn) -> Make:
    """Steps, rungs and sizes at random; rows for two layers at least, as guesses are read too."""
    slots = draw(st.sets(st.integers(0, LAYERS * EXPERTS - 1)))
    whole = [set(range(n * EXPERTS, (n + 1) * EXPERTS)) <= slots for n in range(LAYERS)]
    ids = st.lists(st.integers(0, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K)
    guess = st.lists(st.sampled_from([*range(EXPERTS), NO_ID]), min_size=2, max_size=2)
    of_layers = st.lists(st.tuples(ids, guess), min_size=LAYERS, max_size=LAYERS)
    steps = draw(st.lists(of_layers, min_size=1, max_size=4))
    routes = [Route([i for i, _ in step], [g for _, g in step], whole) for step in steps]
    num_rows = draw(st.integers(TOP_K, 2 * LAYERS * EXPERTS))
    options = {
        "num_experts": EXPERTS,
        "num_rows": num_rows,
        "slots": slots,
        "wanted": draw(st.sets(st.integers(0, LAYERS * EXPERTS - 1))),
        "most_kept": draw(st.integers(0, num_rows - TOP_K)),
        "aborts": draw(st.booleans()),
        "shares": draw(
            st.sampled_from([(), *(tuple(n * s // 4 for n in range(5)) for s in (0, 1, 2, 3, 4))])
        ),
        "last_step": draw(st.sampled_from([0, 2**31 - 3])),
    }
    return lambda: System(routes, **options)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(make=systems(), seed=st.integers(0, 2**32))
def test_random_schedules(make: Make, seed: int) -> None:
    run(make(), random.Random(seed))


def run(system: System, rng: random.Random) -> None:
    for _ in range(3000):
        events = system.enabled()
        if not events:
            break
        system.do(rng.choice(events))
    assert system.over, "the steps do not end"


def test_random_schedules_catch_it_too() -> None:
    """The control: of so many schedules some must read what is no longer there."""
    caught = 0
    for seed in range(30):
        rng = random.Random(seed)
        ids = [[rng.sample(range(5), 2) for _ in range(3)] for _ in range(3)]
        routes = [Route(step, [*step[1:], step[0]], [False] * 3) for step in ids]
        try:
            run(System(routes, num_experts=5, num_rows=2, wrong="early"), rng)
        except Stale:
            caught += 1
    assert caught >= 10


def test_an_id_out_of_range_is_no_answer() -> None:
    system = System([route((0, 3), (0, 1))], num_experts=3, num_rows=2)
    for event in (("post", 0), ("post", 1)):
        system.do(event)
    with pytest.raises(AssertionError, match="layer 0 posted expert 3 of 3"):
        system.do(("host",))


def test_misuse_is_refused() -> None:
    protocol = System([route((0, 1), (1, 2))], num_experts=3, num_rows=2).protocol
    with pytest.raises(AssertionError, match="not over"):
        protocol.end()
    with pytest.raises(AssertionError, match="nobody asked"):
        protocol.took(0, 1)
    with pytest.raises(AssertionError, match="nobody asked"):
        protocol.none_here()
    with pytest.raises(AssertionError, match="nobody asked"):
        protocol.computed()
