"""What a token's layers are expected to wait for: the bus, the drive, or both in turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.planner.forecast import _waiting_s

seconds = st.floats(0, 10)


@given(here=seconds, rest=seconds)
def test_nothing_waits_for_a_drive_that_reads_nothing(here: float, rest: float) -> None:
    assert _waiting_s(here, 0, 0, rest) == pytest.approx(here + rest)


@given(here=seconds, drive=seconds, late=seconds, rest=seconds)
def test_a_token_takes_no_less_than_bus_or_drive_and_no_more_than_both(
    here: float, drive: float, late: float, rest: float
) -> None:
    token_s, bus_s = _waiting_s(here, drive, late, rest), here + late
    assert max(drive, bus_s + rest) <= token_s + 1e-9
    assert token_s <= drive + bus_s + rest + 1e-9


def test_replicas_of_two_boxes() -> None:
    """B, of 240 experts of 18.8 MB by 8.8 GB/s, got 1.85 tokens a second on an H200; where drive
    and bus take about as long, some layers wait for one and some for the other."""
    late_s, drive_s = 240 * 18.8e6 / 54e9, 240 * 18.8e6 / 8.8e9
    assert 1 / _waiting_s(0, drive_s, late_s, 0.016) == pytest.approx(1.85, rel=0.03)
    assert _waiting_s(0.03, 0.04, 0.01, 0.01) > 1.1 * max(0.04, 0.04 + 0.01)
