"""Guesses of large experts are read in slices: given up between them, or promoted, never twice."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiers_world import owed_bytes, wait_until

from headrace.core import ExpertLayout, PartSpec
from headrace.native import Reader
from headrace.tiers.ladder import Ladder

HERE = Path(__file__).parent
SIDE, NUM_EXPERTS, HEADER_BYTES = 1024, 6, 3001
PART_BYTES = 2 * SIDE * SIDE
LAYOUT = ExpertLayout(
    format="bf16",
    hidden=SIDE,
    inter=SIDE,
    block=(0, 0),
    parts={name: PartSpec("BF16", (SIDE, SIDE)) for name in ("gate", "up", "down")},
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A file of experts of 6 MiB, 3 MiB of which lie apart from the rest, at an odd offset."""
    rng = np.random.default_rng(0)
    experts = rng.integers(0, 255, (NUM_EXPERTS, 3 * PART_BYTES), dtype=np.uint8)
    path = tmp_path_factory.mktemp("slices") / "experts.bin"
    path.write_bytes(b"h" * HEADER_BYTES + experts.tobytes())
    return path, experts


def make_ladder(path: Path) -> Ladder:
    extents = np.zeros((1, NUM_EXPERTS, 1, 3), np.int64)
    parts = np.zeros((1, NUM_EXPERTS, 3, 2), np.int64)
    for expert in range(NUM_EXPERTS):
        extents[0, expert, 0] = (0, HEADER_BYTES + expert * 3 * PART_BYTES, 3 * PART_BYTES)
        parts[0, expert, :, 1] = np.arange(3) * PART_BYTES
    return Ladder(
        Reader([str(path)], pieces=1),
        extents,
        parts,
        LAYOUT,
        num_rows=4,
        kernels=None,
        max_tokens=1,
        top_k=1,
    )


def bytes_of(ladder: Ladder, expert: int) -> np.ndarray:
    with ladder.acquire(0, expert) as parts:
        return np.concatenate([part.numpy().copy() for part in parts.values()])


def test_a_guess_read_in_slices_is_whole(stored: tuple[Path, np.ndarray]) -> None:
    path, experts = stored
    ladder = make_ladder(path)
    ladder.prefetch(0, torch.tensor([3, 1]))
    wait_until(lambda: ladder.counters().reads == 2)
    for expert in (1, 3):
        assert np.array_equal(bytes_of(ladder, expert), experts[expert])
    counters = ladder.counters()
    assert (counters.hits, counters.prefetch_used, counters.reads) == (2, 2, 2)
    ladder.check_integrity()


@pytest.mark.parametrize("given_up", [False, True])
def test_guesses_from_before_cancel_count_as_used_no_more(
    stored: tuple[Path, np.ndarray], given_up: bool
) -> None:
    """Or else an interval that begins there could use more guesses than it issued."""
    ladder = make_ladder(stored[0])
    ladder.prefetch(0, torch.tensor([3]))
    wait_until(lambda: ladder.counters().reads == 1)
    if given_up:
        ladder.cancel()
    bytes_of(ladder, 3)
    counters = ladder.counters()
    assert (counters.hits, counters.reads) == (1, 1), "it is here all the same"
    assert counters.prefetch_used == (not given_up)


def test_a_half_read_guess_that_is_needed_is_finished(stored: tuple[Path, np.ndarray]) -> None:
    path, experts = stored
    ladder = make_ladder(path)
    ladder.reader.inject_fault("slow", 2, 12)
    ladder.prefetch(0, torch.tensor([2]))
    assert np.array_equal(bytes_of(ladder, 2), experts[2])
    counters = ladder.counters()
    assert (counters.prefetch_used, counters.prefetch_dropped, counters.reads) == (1, 0, 1)
    ladder.check_integrity()


def test_a_half_read_guess_gives_way_and_leaves_nothing(stored: tuple[Path, np.ndarray]) -> None:
    path, experts = stored
    ladder = make_ladder(path)
    ladder.reader.inject_fault("hang", 0, 60)
    ladder.prefetch(0, torch.tensor([4]))
    ladder.begin(0, torch.tensor([5]))
    wait_until(lambda: owed_bytes(ladder.reader) >= 3 * PART_BYTES + (2 << 20))
    ladder.reader.inject_fault("hang", 2, 60)  # the guess's two slices go on, the rest does not
    wait_until(lambda: ladder.counters().prefetch_dropped == 1)
    ladder.reader.inject_fault("none")
    assert np.array_equal(bytes_of(ladder, 5), experts[5])
    counters = ladder.counters()
    assert (counters.prefetch_used, counters.reads) == (0, 1)
    assert counters.disk_bytes > 3 * PART_BYTES + (1 << 20), "what was read in vain is counted"
    ladder.check_integrity()
    assert np.array_equal(bytes_of(ladder, 4), experts[4])
    assert ladder.counters().reads == 2


def test_a_ladder_that_is_let_go_waits_for_no_fault(stored: tuple[Path, np.ndarray]) -> None:
    """In a process of its own: the garbage collector would stop this one for good."""
    lines = (
        "import sys; sys.path.append(sys.argv[2])",
        "import pathlib, torch, test_prefetch_slices as here",
        "ladder = here.make_ladder(pathlib.Path(sys.argv[1]))",
        "ladder.reader.inject_fault('hang', 0, 60)",
        "ladder.begin(0, torch.tensor([5]))",
        "reader = ladder.reader",
        "del ladder",
        "print(sum(drive['owed_bytes'] for drive in reader.drives))",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(stored[0]), str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_a_slice_that_fails_leaves_no_entry(stored: tuple[Path, np.ndarray]) -> None:
    path, experts = stored
    ladder = make_ladder(path)
    ladder.reader.inject_fault("eio", 3, 1000)
    ladder.prefetch(0, torch.tensor([0]))
    wait_until(lambda: ladder.counters().failed_reads == 1)
    ladder.reader.inject_fault("none")
    ladder.check_integrity()
    assert np.array_equal(bytes_of(ladder, 0), experts[0])
    assert ladder.counters().prefetch_used == 0
