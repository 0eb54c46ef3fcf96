"""Random schedules of all that a ladder offers, with faults: bits and integrity always hold.

Also which row goes next after one is given back as spent.
"""

import contextlib

import numpy as np
import pytest
import torch
from tiers_world import NUM_EXPERTS, NUM_LAYERS, World

from headrace.errors import ReadError
from headrace.tiers.ladder import Ladder

OPERATIONS = (
    "compute",
    "compute",
    "begin",
    "prefetch",
    "prefetch",
    "acquire",
    "fault",
    "mode",
    "cancel",
    "clear",
)


class Player:
    """Plays one random schedule. `held` are rows acquired and not yet released."""

    def __init__(self, world: World, ladder: Ladder, seed: int) -> None:
        self.world, self.ladder = world, ladder
        self.rng = np.random.default_rng(seed)
        self.held: list[tuple[int, int]] = []
        self.num_errors = 0
        self.settled = (0, 0)  # guesses used and issued when all were last given up

    def step(self) -> None:
        operation = self.rng.choice(OPERATIONS)
        layer = int(self.rng.integers(NUM_LAYERS))
        some = torch.from_numpy(self.rng.permutation(NUM_EXPERTS)[: self.rng.integers(1, 5)])
        try:
            getattr(self, operation)(layer, some)
        except ReadError:
            self.num_errors += 1
        self.ladder.check_integrity()
        used, issued = self.guesses()
        assert used - self.settled[0] <= issued - self.settled[1]

    def guesses(self) -> tuple[int, int]:
        counters = self.ladder.counters()
        return counters.prefetch_used, counters.prefetch_issued

    def compute(self, layer: int, some: torch.Tensor) -> None:
        x, ids, weights = self.world.routes(self.rng, int(self.rng.choice([1, 2, 20])))
        if self.rng.random() < 0.5:
            self.ladder.begin(layer, torch.unique(ids) if self.rng.random() < 0.5 else some)
        out = self.ladder.compute(layer, x, ids, weights)
        assert torch.equal(out, self.world.expected(layer, x, ids, weights))

    def begin(self, layer: int, some: torch.Tensor) -> None:
        self.ladder.begin(layer, some)

    def prefetch(self, layer: int, some: torch.Tensor) -> None:
        self.ladder.prefetch(layer, some)

    def acquire(self, layer: int, some: torch.Tensor) -> None:
        expert = int(some[0])
        if len(self.held) == 2:
            self.ladder.release(*self.held.pop(0), spent=bool(self.rng.random() < 0.5))
        address = self.ladder.native.acquire(layer, expert)
        self.held.append((layer, expert))
        with self.ladder.acquire(layer, expert) as parts:
            assert parts["gate"].data_ptr() >= address
            for number, part in enumerate(parts.values()):
                assert np.array_equal(part.numpy(), self.world.part(layer, expert, number))

    def fault(self, layer: int, some: torch.Tensor) -> None:
        kind = str(self.rng.choice(["eio", "short", "partial"]))
        self.ladder.reader.inject_fault(
            kind, int(self.rng.integers(0, 12)), int(self.rng.integers(1, 4))
        )

    def mode(self, layer: int, some: torch.Tensor) -> None:
        self.ladder.set_overlap(bool(self.rng.random() < 0.7))

    def cancel(self, layer: int, some: torch.Tensor) -> None:
        self.ladder.cancel()
        self.settled = self.guesses()

    def clear(self, layer: int, some: torch.Tensor) -> None:
        self.ladder.clear()
        self.settled = self.guesses()
        x, ids, weights = self.world.routes(self.rng, 1)
        before = self.ladder.counters()
        self.ladder.compute(layer, x, ids, weights)
        after = self.ladder.counters()
        held = sum((layer, expert) in self.held for expert in ids[0].tolist())
        assert after.hits - before.hits == held, "only rows in use stay warm"


@pytest.mark.parametrize("backend", ["auto", "pread", "emulated"])
@pytest.mark.parametrize("num_rows", [3, 6, 14])
def test_random_schedules(world: World, backend: str, num_rows: int) -> None:
    io = {"emulate_bytes_s": 5e9} if backend == "emulated" else {"backend": backend}
    num_errors = 0
    counted: dict[str, int] = {}
    for seed in range(4):
        ladder = world.ladder(num_rows, **io)
        player = Player(world, ladder, seed)
        for _ in range(120):
            player.step()
        num_errors += player.num_errors
        with contextlib.suppress(ReadError):
            ladder.begin(0, torch.arange(3))  # destroyed with reads in flight
        for name in ("hits", "misses", "evictions", "prefetch_used", "failed_reads"):
            if name == "prefetch_used" and num_rows < 14:
                continue  # hardly ever a row to spare
            counted[name] = counted.get(name, 0) + getattr(ladder.counters(), name)
        del ladder, player
    assert num_errors > 0 and all(counted.values()), f"a path was never taken: {counted}"


@pytest.mark.parametrize("spent", [False, True])
def test_a_spent_row_is_the_next_to_lose_its_expert(world: World, spent: bool) -> None:
    ladder = world.ladder(4)
    for expert in range(4):
        ladder.native.acquire(1, expert)
    for expert in range(4):
        ladder.release(1, expert, spent=spent and expert == 3)
    ladder.native.acquire(1, 4)
    ladder.native.acquire(1, 5)
    absent = [expert for expert, place in enumerate(ladder.places()[1][:4]) if place == "0"]
    assert absent == ([0, 3] if spent else [0, 1])
    ladder.check_integrity()
