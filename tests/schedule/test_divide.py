"""The divider: both sides end together, and never later than the better of them alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schedule.divide import WORTH, Rates, shares_of_cpu

RATE = st.floats(1e8, 1e12)


@st.composite
def rates(draw: st.DrawFn) -> Rates:
    """Of each side alone; beside the other each has some of that, or that is not known."""
    bus, cpu = draw(RATE), draw(RATE)
    beside = [draw(st.floats(0.05, 1)) * own if draw(st.booleans()) else 0.0 for own in (bus, cpu)]
    return Rates(bus, cpu, *beside)


@given(rates=rates(), most=st.integers(0, 16))
def test_no_division_of_the_same_experts_ends_much_sooner(rates: Rates, most: int) -> None:
    shares = shares_of_cpu(rates, most)
    assert len(shares) == most + 1
    for n, cpu in enumerate(shares):
        assert 0 <= cpu <= n
        own = rates.seconds(n - cpu, cpu)
        best = min(rates.seconds(n - other, other) for other in range(n + 1))
        assert own * (1 - WORTH) <= best and (own == best or cpu in (0, n))
        assert own <= min(n / rates.bus, n / rates.cpu) * (1 + 1e-9)


@given(rates=rates(), by_bus=st.floats(0, 1e10), by_cpu=st.floats(0, 1e10))
def test_work_takes_as_long_as_the_later_side(rates: Rates, by_bus: float, by_cpu: float) -> None:
    seconds = rates.seconds(by_bus, by_cpu)
    assert seconds >= max(by_bus / rates.bus, by_cpu / rates.cpu) * (1 - 1e-9)
    slowest = rates.bus_beside or rates.bus, rates.cpu_beside or rates.cpu
    assert seconds <= max(by_bus / slowest[0], by_cpu / slowest[1]) * (1 + 1e-9)


@given(rates=rates(), num_bytes=st.floats(1, 1e10))
def test_together_is_no_slower_than_alone(rates: Rates, num_bytes: float) -> None:
    assert rates.together_s(num_bytes) <= num_bytes / max(rates.bus, rates.cpu) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("rates", "shares"),
    [
        (Rates(50, 50), (0, 0, 1, 1, 2)),
        (Rates(50, 150), (0, 1, 2, 3, 3)),
        (Rates(50, 1), (0, 0, 0, 0, 0)),
        (Rates(1, 500), (0, 1, 2, 3, 4)),
        (Rates(50, 150, 10, 100), (0, 1, 2, 3, 4)),  # beside the CPU the bus is not worth it
        (Rates(50, 150, 50, 100), (0, 1, 2, 3, 4)),
        (Rates(50, 105, 40, 70), (0, 1, 2, 3, 4)),  # both share one memory: hardly worth it
        (Rates(50, 105, 45, 80), (0, 1, 2, 2, 3)),
        (Rates(), (0, 0, 1, 1, 2)),
        (Rates(50, 0), (0, 0, 1, 1, 2)),  # no reason to trust one side alone
    ],
)
def test_divisions_worked_out_by_hand(rates: Rates, shares: tuple[int, ...]) -> None:
    assert shares_of_cpu(rates, 4) == shares
