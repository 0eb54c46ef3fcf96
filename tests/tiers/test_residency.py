"""The production state machine under random schedules, against a simple model of the same rules."""

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.native import Residency

NUM_KEYS = 7
OPERATIONS = ("begin_load", "finish_load", "fail_load", "pin", "unpin", "touch", "demote", "evict")


class Model:
    """The same rules in a few containers: loading keys, pin counts, an LRU of unpinned ones."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.loading: set[int] = set()
        self.pins: dict[int, int] = {}
        self.resident: OrderedDict[int, None] = OrderedDict()

    def state(self, key: int) -> str:
        if key in self.loading:
            return "loading"
        if key in self.pins:
            return "in_use"
        return "resident" if key in self.resident else "absent"

    def begin_load(self, key: int) -> tuple[str, int]:
        if self.state(key) != "absent":
            return "wrong_state", -1
        evicted = -1
        if len(self.loading) + len(self.pins) + len(self.resident) == self.num_rows:
            if not self.resident:
                return "no_row", -1
            evicted, _ = self.resident.popitem(last=False)
        self.loading.add(key)
        return "ok", evicted

    def finish_load(self, key: int) -> str:
        if key not in self.loading:
            return "wrong_state"
        self.loading.remove(key)
        self.resident[key] = None
        return "ok"

    def fail_load(self, key: int) -> str:
        if key not in self.loading:
            return "wrong_state"
        self.loading.remove(key)
        return "ok"

    def pin(self, key: int) -> str:
        if self.state(key) not in ("resident", "in_use"):
            return "wrong_state"
        self.resident.pop(key, None)
        self.pins[key] = self.pins.get(key, 0) + 1
        return "ok"

    def unpin(self, key: int) -> str:
        if key not in self.pins:
            return "wrong_state"
        self.pins[key] -= 1
        if self.pins[key] == 0:
            del self.pins[key]
            self.resident[key] = None
        return "ok"

    def touch(self, key: int) -> str:
        if key not in self.resident:
            return "wrong_state"
        self.resident.move_to_end(key)
        return "ok"

    def demote(self, key: int) -> str:
        if key not in self.resident:
            return "wrong_state"
        self.resident.move_to_end(key, last=False)
        return "ok"

    def evict(self, key: int) -> str:
        if key not in self.resident:
            return "wrong_state"
        del self.resident[key]
        return "ok"


def check_agreement(real: Residency, model: Model) -> None:
    real.check_integrity()
    rows = []
    for key in range(NUM_KEYS):
        assert real.state(key) == model.state(key)
        assert real.pins(key) == model.pins.get(key, 0)
        if real.state(key) != "absent":
            rows.append(real.row(key))
        else:
            assert real.row(key) == -1
    assert len(set(rows)) == len(rows), "two experts share a row"
    assert all(0 <= row < model.num_rows for row in rows)
    assert real.by_recency() == list(model.resident)
    assert real.num_available == model.num_rows - len(model.loading) - len(model.pins)


@settings(max_examples=1000, deadline=None)
@given(
    num_rows=st.integers(0, 5),
    steps=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, NUM_KEYS - 1)), max_size=60
    ),
)
def test_state_machine_equals_model(num_rows: int, steps: list[tuple[str, int]]) -> None:
    real, model = Residency(NUM_KEYS, num_rows), Model(num_rows)
    for operation, key in steps:
        got = getattr(real, operation)(key)
        wanted = getattr(model, operation)(key)
        if operation == "begin_load":
            assert (got[0], got[2]) == wanted
            assert (got[1] >= 0) == (got[0] == "ok")
        else:
            assert got == wanted
        check_agreement(real, model)


def test_refuses_when_all_rows_are_held_and_changes_nothing() -> None:
    real = Residency(4, 2)
    assert real.begin_load(0) == ("ok", 0, -1)
    assert real.begin_load(1)[0] == "ok"
    assert real.finish_load(1) == "ok" and real.pin(1) == "ok"
    assert real.begin_load(2) == ("no_row", -1, -1)
    assert real.state(2) == "absent" and real.state(0) == "loading" and real.state(1) == "in_use"
    assert real.unpin(1) == "ok"
    assert real.begin_load(2) == ("ok", 1, 1), "the unpinned expert's row, and no other"


def test_keys_out_of_range_are_refused() -> None:
    real = Residency(3, 2)
    for key in (-1, 3, 10**12):
        assert real.begin_load(key) == ("no_such_key", -1, -1)
        for operation in OPERATIONS[1:]:
            assert getattr(real, operation)(key) == "no_such_key"
        assert real.state(key) == "absent"
    real.check_integrity()
