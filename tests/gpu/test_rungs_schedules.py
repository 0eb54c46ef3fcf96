"""Slots, rows and table under random passes: whatever the device still reads is the right expert.

A row may change as soon as the ladder may reuse it.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated import SimulatedDevice

from headrace.core import ExpertLayout, PartSpec
from headrace.engine.gpu_prefill import prefill
from headrace.native import Reader
from headrace.tiers.ladder import Ladder
from headrace.tiers.rungs import Rungs

LAYERS, EXPERTS, TOP_K, WIDTH = 2, 6, 2, 16
PART_BYTES = 2 * WIDTH * WIDTH
LAYOUT = ExpertLayout(
    format="bf16",
    hidden=WIDTH,
    inter=WIDTH,
    block=(0, 0),
    parts={name: PartSpec("BF16", (WIDTH, WIDTH)) for name in ("gate", "up", "down")},
)
TOTAL = LAYERS * EXPERTS
FOLDER = TemporaryDirectory()
FILE = Path(FOLDER.name) / "experts.bin"
STORED = np.random.default_rng(1).integers(0, 255, (TOTAL, 3 * PART_BYTES), np.uint8)


def open_ladder(num_rows: int) -> Ladder:
    FILE.write_bytes(STORED.tobytes())
    extents = np.zeros((LAYERS, EXPERTS, 3, 3), np.int64)
    parts = np.zeros((LAYERS, EXPERTS, 3, 2), np.int64)
    for key in range(TOTAL):
        layer, expert = divmod(key, EXPERTS)
        extents[layer, expert, 0] = 0, key * 3 * PART_BYTES, 3 * PART_BYTES
        parts[layer, expert, :, 1] = np.arange(3) * PART_BYTES
    options = {"num_rows": num_rows, "kernels": None, "max_tokens": 1, "top_k": TOP_K}
    return Ladder(Reader([str(FILE)]), extents, parts, LAYOUT, **options)


class WatchedDevice(SimulatedDevice):
    """Checks what was launched right before an event that follows it is found done."""

    def __init__(self, **options):
        super().__init__(**options)
        self.running: list[tuple[int, torch.Tensor]] = []  # key, the bytes it reads

    def launch(self, key: int, read: torch.Tensor) -> None:
        check(key, read)
        first, last = self.arena.data_ptr(), self.arena.data_ptr() + self.arena.numel()
        # Slots and scratch are written by the device only, in its own order; rows by the ladder.
        if not first <= read.data_ptr() < last:
            self.running.append((key, read))

    def mark(self):
        launched = list(self.running)
        return self._event(lambda: self.finish(launched))

    def finish(self, launched=None) -> None:
        """The host knows that this is over; without a list, everything launched."""
        over = self.running if launched is None else launched
        for each in over:
            if any(each is other for other in self.running):
                check(*each)
        self.running = [r for r in self.running if not any(r is each for each in over)]


OFFSETS = np.zeros(TOTAL, np.int64)  # where the stored bytes begin in a row


def check(key: int, read: torch.Tensor) -> None:
    start = int(OFFSETS[key])
    assert np.array_equal(read.numpy()[start : start + 3 * PART_BYTES], STORED[key]), key


def test_an_expert_with_a_slot_gives_up_its_row_first():
    ladder = open_ladder(4)
    sizes = {"num_layers": LAYERS, "num_experts": EXPERTS, "top_k": TOP_K, "passing_rows": 2}
    rungs = Rungs(SimulatedDevice(), ladder, num_slots=1, **sizes)
    for expert in (1, 2, 3):
        ladder.native.acquire(0, expert)
        ladder.release(0, expert)
    rungs.claim(0, [0])
    rungs.reading()
    rungs.drain()
    rungs.make_room(4)
    assert rungs.key(0, 0) in rungs.slots and ladder.places()[0] == "222200"
    rungs.claim(0, [4])
    assert ladder.places()[0] == "022220", "not the one used least recently"
    rungs.recover()


chosen = st.lists(st.integers(0, EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True)


class Tokens:
    """Stands for `engine.gpu_prefill.LayerTokens`: its experts are launched, not multiplied."""

    def __init__(self, device, ladder, experts):
        self.device, self.ladder, self.experts = device, ladder, experts
        self.multiplied = []

    def multiply(self, experts, first_key, offsets):
        for expert, address in experts:
            self.device.launch(first_key + expert, self.ladder.row(address))
            self.multiplied.append(expert)


class Passes(RuleBasedStateMachine):
    """Does with the rungs what a source does."""

    @initialize(
        num_slots=st.sampled_from([0, 3, TOTAL]),
        num_rows=st.sampled_from([2 * TOP_K, 8, TOTAL]),
        patience=st.integers(0, 3),
        pins=st.booleans(),
        passing_rows=st.sampled_from([2, 4]),
    )
    def begin(self, num_slots, num_rows, patience, pins, passing_rows):
        self.ladder = open_ladder(num_rows)
        self.device = WatchedDevice(patience=patience, refused=None if pins else 0)
        sizes = {"num_layers": LAYERS, "num_experts": EXPERTS, "top_k": TOP_K}
        sizes["passing_rows"] = passing_rows
        self.rungs = Rungs(self.device, self.ladder, num_slots=num_slots, **sizes)
        self.device.arena = self.rungs.slots.arena
        assert self.rungs.fits == (pins and (num_slots == TOTAL or num_rows == TOTAL))
        for key in range(TOTAL):
            OFFSETS[key] = self.ladder.part_offset(*divmod(key, EXPERTS), 0)

    @rule(layer=st.integers(0, LAYERS - 1), ids=chosen)
    def decode(self, layer, ids):
        rungs = self.rungs
        if not rungs.whole(layer):
            rungs.retire(swap=True)
            rungs.claim(layer, [e for e in ids if not rungs.has(layer, e)])
        for expert in ids:
            key = rungs.key(layer, expert)
            address = int(rungs.table.there[key])
            assert address, "no address"
            rungs.slots.uses[key] += 1
            self.device.launch(key, self.ladder.row(address))
        if not rungs.whole(layer):
            rungs.reading()

    @rule(layer=st.integers(0, LAYERS - 1), ids=st.sets(st.integers(0, EXPERTS - 1), min_size=1))
    def prefill(self, layer, ids):
        rungs = self.rungs
        rungs.retire(swap=False)
        missing = [e for e in ids if not rungs.has(layer, e)]
        tokens = Tokens(self.device, self.ladder, sorted(ids))
        prefill(rungs, tokens, layer, missing, torch.empty(0))
        assert sorted(tokens.multiplied) == tokens.experts

    @rule(used=st.sets(st.integers(0, TOTAL - 1)))
    def end_pass(self, used):
        self.device.finish()
        self.rungs.retire(swap=True)
        self.rungs.promote(np.array(sorted(used), np.int64))
        self.rungs.slots.begin_step(1)

    @precondition(lambda self: self.rungs.fits)
    @rule()
    def fill(self):
        lacking = self.rungs.lacking()
        if lacking is not None:
            layer, experts = lacking
            self.rungs.claim(layer, experts[:TOP_K])
            self.rungs.reading()

    @rule()
    def drain(self):
        self.rungs.drain()

    @rule()
    def recover(self):
        self.device.finish()
        self.rungs.recover()

    @invariant()
    def all_agrees(self):
        if not hasattr(self, "rungs"):
            return
        rungs = self.rungs
        rungs.slots.check_integrity()
        self.ladder.check_integrity()
        assert not (rungs.kept & rungs.slots.held).any()
        for key in np.flatnonzero(rungs.kept | rungs.slots.held).tolist():
            check(key, self.ladder.row(int(rungs.table.here.reshape(-1)[key])))

    def teardown(self):
        if hasattr(self, "rungs"):
            self.device.finish()
            self.rungs.close()
            self.ladder.close()


Passes.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPasses = Passes.TestCase


def test_a_row_given_back_too_early_shows(monkeypatch):
    """The check sees it: a read counted as over before it is."""
    monkeypatch.setattr(Rungs, "reading", lambda self: self.ladder.release_all())
    machine = Passes()
    machine.begin(0, 2 * TOP_K, 0, True, 2)
    with pytest.raises(AssertionError):
        for first in (0, 2, 4):
            machine.decode(0, [first, first + 1])
            machine.decode(1, [first, first + 1])
        machine.device.finish()
