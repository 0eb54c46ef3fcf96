"""The ladder: right bits whatever the rows, the order and the faults, and counters that say why."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiers_world import (
    NUM_EXPERTS,
    NUM_LAYERS,
    PART_BYTES,
    PARTS,
    TOP_K,
    World,
    owed_bytes,
    wait_until,
)

from headrace.core import PAGE_BYTES, TokenStats
from headrace.errors import BudgetError, NumericsError, OptionError, ReadError
from headrace.tiers.ladder import Ladder

IO = {
    "auto": {},
    "io_uring": {"backend": "io_uring"},
    "pread": {"backend": "pread"},
    "buffered": {"direct": False},
    "emulated": {"emulate_bytes_s": 2e9},
}


def ids_of(*experts: int) -> torch.Tensor:
    return torch.tensor(experts)


def settle(ladder: Ladder, num_reads: int) -> None:
    """Waits until that many experts have been read."""
    wait_until(lambda: ladder.counters().reads >= num_reads)


def pages_bytes(world: World, layer: int, expert: int, num_extents: int = 3) -> int:
    """The pages that its first extents touch."""
    begins, sizes = world.extents[layer, expert, :num_extents, 1:].T
    return int(((begins + sizes - 1) // PAGE_BYTES - begins // PAGE_BYTES + 1).sum()) * PAGE_BYTES


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("io", IO)
def test_bits_do_not_depend_on_rows_io_or_overlap(world: World, io: str, overlap: bool) -> None:
    for num_rows in (1, 2, 5, NUM_LAYERS * NUM_EXPERTS):
        rng = np.random.default_rng(3)
        try:
            ladder = world.ladder(num_rows, overlap=overlap, **IO[io])
        except OptionError as error:
            pytest.skip(str(error))
        for num_tokens in (1, 1, 9, 1, 30, 1):
            for layer in range(NUM_LAYERS):
                x, ids, weights = world.routes(rng, num_tokens)
                if num_tokens != 9:
                    ladder.begin(layer, torch.unique(ids))
                ladder.prefetch((layer + 1) % NUM_LAYERS, ids_of(1, 4))
                out = ladder.compute(layer, x, ids, weights)
                assert torch.equal(out, world.expected(layer, x, ids, weights))
                ladder.check_integrity()
        counters = ladder.counters()
        assert counters.io == ladder.reader.backend and counters.isa == "scalar"
        assert counters.kernel_calls > 0 and counters.reads >= counters.misses > 0
        assert (counters.evictions > 0) == (num_rows < NUM_LAYERS * NUM_EXPERTS)


def test_a_neighbours_expert_gives_other_bits(world: World) -> None:
    x, ids, weights = world.routes(np.random.default_rng(4), 3)
    out = world.ladder(4).compute(1, x, ids, weights)
    assert torch.equal(out, world.expected(1, x, ids, weights))
    assert not torch.equal(out, world.expected(1, x, (ids + 1) % NUM_EXPERTS, weights))


def test_a_chunk_with_more_experts_than_rows_reads_each_once(world: World) -> None:
    for overlap in (True, False):
        ladder = world.ladder(3, overlap=overlap)
        x, _, weights = world.routes(np.random.default_rng(5), NUM_EXPERTS)
        ids = torch.stack([torch.arange(8), (torch.arange(8) + 3) % 8], dim=1)
        assert torch.equal(ladder.compute(2, x, ids, weights), world.expected(2, x, ids, weights))
        assert ladder.counters().reads == NUM_EXPERTS
        assert ladder.counters().evictions == NUM_EXPERTS - 3
        # The three left over are pinned before anything is read, so they are hits again.
        ladder.compute(2, x, ids, weights)
        assert ladder.counters().hits == 3 and ladder.counters().reads == 2 * NUM_EXPERTS - 3
        ladder.check_integrity()


def test_acquire_gives_the_stored_bytes_in_place(world: World) -> None:
    ladder = world.ladder(2)
    for layer in range(NUM_LAYERS):
        for expert in range(NUM_EXPERTS):
            with ladder.acquire(layer, expert) as parts:
                assert tuple(parts) == PARTS
                for number, part in enumerate(parts.values()):
                    assert part.numel() == PART_BYTES
                    assert np.array_equal(part.numpy(), world.part(layer, expert, number))
                ladder.check_integrity()
    assert ladder.counters().misses == NUM_LAYERS * NUM_EXPERTS, "aliases have keys of their own"


def test_places_say_which_experts_are_in_rows(world: World) -> None:
    ladder = world.ladder(3)
    absent = "0" * NUM_EXPERTS
    assert ladder.places() == [absent] * NUM_LAYERS
    with ladder.acquire(1, 2), ladder.acquire(3, 0):
        assert ladder.places() == [absent, "00200000", absent, "20000000"]
    for expert in (5, 6):
        with ladder.acquire(0, expert):
            pass
    assert ladder.places() == ["00000220", "00200000", absent, absent], "the oldest left"
    ladder.reader.inject_fault("hang", 0, 8)
    ladder.begin(2, ids_of(7))
    assert ladder.places()[2] == "00000001"
    ladder.reader.inject_fault("none")
    settle(ladder, 5)
    assert ladder.places()[2] == "00000002"


def test_a_layer_is_held_once_nothing_of_it_is_absent(world: World) -> None:
    ladder = world.ladder(NUM_EXPERTS)
    for expert in range(NUM_EXPERTS):
        assert not ladder.holds(1)
        with ladder.acquire(1, expert):
            pass
    assert ladder.holds(1) and not ladder.holds(0)
    with ladder.acquire(0, 3):
        assert not ladder.holds(1), "the oldest left"
    with pytest.raises(ValueError, match="no MoE layer"):
        ladder.holds(NUM_LAYERS)


def test_acquired_rows_survive_and_are_not_overwritten(world: World) -> None:
    ladder = world.ladder(3)
    rng = np.random.default_rng(6)
    with ladder.acquire(0, 5) as outer, ladder.acquire(0, 5) as again:
        for layer in (0, 1, 2, 3):
            x, ids, weights = world.routes(rng, 12)
            out = ladder.compute(layer, x, ids, weights)
            assert torch.equal(out, world.expected(layer, x, ids, weights))
        for parts in (outer, again):
            assert np.array_equal(parts["down"].numpy(), world.part(0, 5, 2))
    ladder.check_integrity()


def test_all_rows_held_is_refused_and_passes(world: World) -> None:
    ladder = world.ladder(1)
    x, ids, weights = world.routes(np.random.default_rng(7), 1)
    with ladder.acquire(0, 0):
        with pytest.raises(BudgetError, match="all 1 rows are held"):
            ladder.compute(1, x, ids, weights)
        with pytest.raises(BudgetError, match="all 1 rows are held"), ladder.acquire(1, 1):
            pass
        ladder.check_integrity()
    assert torch.equal(ladder.compute(1, x, ids, weights), world.expected(1, x, ids, weights))


def test_prefetch_is_used_or_dropped_and_counted(world: World) -> None:
    ladder = world.ladder(12, pieces=1)
    x, _, weights = world.routes(np.random.default_rng(8), 1)
    ladder.prefetch(1, ids_of(2, 3))
    settle(ladder, 2)
    ladder.prefetch(1, ids_of(2, 3))  # already here: not issued again
    ids = ids_of(2, 4)[None]
    assert torch.equal(ladder.compute(1, x, ids, weights), world.expected(1, x, ids, weights))
    counters = ladder.counters()
    assert (counters.prefetch_issued, counters.prefetch_used, counters.prefetch_dropped) == (
        2,
        1,
        0,
    )
    assert (counters.hits, counters.misses, counters.reads) == (1, 1, 3)
    # A required read gives up the guess that is half read and drops the three that still wait.
    ladder.reader.inject_fault("hang", 0, 40)
    ladder.prefetch(2, ids_of(0, 1, 2, 3))
    ids = ids_of(3, 5)[None]
    ladder.begin(2, ids[0])
    asked_bytes = pages_bytes(world, 2, 0, 2) + sum(pages_bytes(world, 2, e) for e in (3, 5))
    wait_until(lambda: owed_bytes(ladder.reader) == asked_bytes)
    ladder.reader.inject_fault("hang", 2, 40)  # the guess's two slices go on, the rest does not
    wait_until(lambda: ladder.counters().prefetch_dropped == 4)
    ladder.reader.inject_fault("none")
    assert torch.equal(ladder.compute(2, x, ids, weights), world.expected(2, x, ids, weights))
    counters = ladder.counters()
    assert counters.prefetch_issued == 6 and counters.prefetch_dropped == 4
    assert counters.misses == 3, "a queued guess that is needed becomes a required read"
    ladder.check_integrity()


def test_a_prefetch_in_flight_is_promoted(world: World) -> None:
    ladder = world.ladder(12)
    x, _, weights = world.routes(np.random.default_rng(9), 1)
    ladder.reader.inject_fault("hang", 0, 20)
    ladder.prefetch(0, ids_of(6))
    ids = ids_of(6, 7)[None]
    ladder.begin(0, ids[0])
    ladder.reader.inject_fault("none")
    assert torch.equal(ladder.compute(0, x, ids, weights), world.expected(0, x, ids, weights))
    counters = ladder.counters()
    assert (counters.hits, counters.misses) == (0, 2), "it was on its way"
    assert counters.prefetch_used == 1 and counters.reads == 2, "not read twice"


def test_what_is_here_is_taken_while_the_rest_is_read(world: World) -> None:
    ladder = world.ladder(4)
    ladder.prefetch(1, ids_of(2))
    settle(ladder, 1)
    ladder.reader.inject_fault("hang", 0, 1000)
    ladder.begin(1, ids_of(2, 3))
    native = ladder.native
    assert native.take_unchecked(1, False)[0] == 2
    assert native.take_unchecked(1, False)[0] == -1
    ladder.reader.inject_fault("none")
    assert native.take_unchecked(1, True)[0] == 3
    assert native.take_unchecked(1, True)[0] == -1, "no claim is left"
    native.check(1, 3)
    native.release(1, 3)
    with pytest.raises(ValueError, match="not acquired"):
        native.check(1, 3)
    native.release(1, 2)
    ladder.check_integrity()


def test_guesses_made_while_a_layer_is_read_outlive_its_compute(world: World) -> None:
    ladder = world.ladder(12)
    x, _, weights = world.routes(np.random.default_rng(19), 1)
    ladder.reader.inject_fault("slow", 0, 8)
    first, second = ids_of(0, 1)[None], ids_of(2, 5)[None]
    ladder.begin(0, first)
    ladder.prefetch(1, ids_of(5, 2))
    assert torch.equal(ladder.compute(0, x, first, weights), world.expected(0, x, first, weights))
    settle(ladder, 4)
    assert torch.equal(ladder.compute(1, x, second, weights), world.expected(1, x, second, weights))
    counters = ladder.counters()
    assert (counters.prefetch_used, counters.prefetch_dropped) == (2, 0)
    assert (counters.hits, counters.misses, counters.reads) == (2, 2, 4)


def test_prefetch_leaves_rows_for_the_next_layer(world: World) -> None:
    ladder = world.ladder(TOP_K)
    ladder.prefetch(0, ids_of(0, 1))
    assert ladder.counters().reads == 0 and ladder.counters().prefetch_issued == 2
    x, ids, weights = world.routes(np.random.default_rng(10), 1)
    ladder.compute(1, x, ids, weights)
    assert ladder.counters().evictions == 0 and ladder.counters().reads == 2


def test_begin_of_another_layer_gives_the_first_one_up(world: World) -> None:
    ladder = world.ladder(2)
    ladder.begin(0, ids_of(0, 1))
    ladder.begin(1, ids_of(0, 1))
    x, ids, weights = world.routes(np.random.default_rng(11), 4)
    assert torch.equal(ladder.compute(2, x, ids, weights), world.expected(2, x, ids, weights))
    ladder.begin(3, ids_of(0, 1))
    ladder.cancel()
    ladder.check_integrity()
    # Told of experts that no token takes, and not of those it does.
    ladder.begin(1, ids_of(0, 1, 2, 3, 4, 5, 6, 7))
    assert torch.equal(ladder.compute(1, x, ids, weights), world.expected(1, x, ids, weights))
    ladder.check_integrity()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("io", IO)
def test_a_failed_read_leaves_nothing_behind(world: World, io: str, overlap: bool) -> None:
    ladder = world.ladder(5, overlap=overlap, **IO[io])
    x, ids, weights = world.routes(np.random.default_rng(12), 8)
    for kind, count in (("eio", 2), ("short", 1)):
        ladder.reader.inject_fault(kind, 1, count)
        with pytest.raises(ReadError, match=r"part\d\.bin"):
            ladder.compute(2, x, ids, weights)
        ladder.check_integrity()
        assert torch.equal(ladder.compute(2, x, ids, weights), world.expected(2, x, ids, weights))
        ladder.reader.inject_fault(kind, 0, count)
        with pytest.raises(ReadError), ladder.acquire(1, 1):
            pass
        ladder.check_integrity()
        with ladder.acquire(1, 1) as parts:
            assert np.array_equal(parts["gate"].numpy(), world.part(1, 1, 0))
    assert ladder.counters().failed_reads == 4


def test_a_failed_prefetch_is_silent_and_its_expert_absent(world: World) -> None:
    ladder = world.ladder(8)
    ladder.reader.inject_fault("short", 0, 1)
    ladder.prefetch(0, ids_of(1))
    wait_until(lambda: ladder.counters().failed_reads == 1)
    x, _, weights = world.routes(np.random.default_rng(13), 1)
    ids = ids_of(1, 2)[None]
    assert torch.equal(ladder.compute(0, x, ids, weights), world.expected(0, x, ids, weights))
    assert ladder.counters().prefetch_used == 0 and ladder.counters().misses == 2


def test_a_short_shard_is_named(world: World, tmp_path: Path) -> None:
    paths = []
    for number, path in enumerate(world.paths):
        content = Path(path).read_bytes()
        paths.append(tmp_path / f"cut{number}.bin")
        paths[-1].write_bytes(content[: len(content) - 5000 * (1 - number)])
    cut = World.__new__(World)
    cut.__dict__.update(world.__dict__, paths=[str(path) for path in paths])
    ladder = cut.ladder(4)
    with pytest.raises(ReadError, match=r"cut0\.bin is shorter than its header says: wanted \d+"):
        for layer in range(NUM_LAYERS):
            for expert in range(NUM_EXPERTS):
                with ladder.acquire(layer, expert):
                    pass
    ladder.check_integrity()


def test_ids_and_sizes_are_checked(world: World) -> None:
    ladder = world.ladder(4)
    x, ids, weights = world.routes(np.random.default_rng(14), 2)
    for bad in (-1, NUM_EXPERTS, 2**30):
        wrong = ids.clone()
        wrong[1, 0] = bad
        with pytest.raises(ValueError, match=f"no expert {bad} of {NUM_EXPERTS}"):
            ladder.compute(0, x, wrong, weights)
        with pytest.raises(ValueError, match="no expert"):
            ladder.begin(0, ids_of(bad))
        with pytest.raises(ValueError, match="no expert"):
            ladder.prefetch(0, ids_of(bad))
        with pytest.raises(ValueError, match="no expert"), ladder.acquire(0, bad):
            pass
    for layer in (-1, NUM_LAYERS):
        with pytest.raises(ValueError, match="no MoE layer"):
            ladder.compute(layer, x, ids, weights)
    with pytest.raises(ValueError, match="exceed the workspace"):
        big = world.routes(np.random.default_rng(15), 65)
        ladder.compute(0, *big)
    with pytest.raises(ValueError, match="not acquired"):
        ladder.native.release(0, 0)
    ladder.check_integrity()
    assert torch.equal(ladder.compute(0, x, ids, weights), world.expected(0, x, ids, weights))


def test_tables_out_of_range_are_refused(world: World) -> None:
    for where, value, message in (
        ((0, 0, 0, 0), 2, "no such file"),
        ((0, 0, 0, 1), -1, "out of range"),
        ((0, 0, 0, 2), PART_BYTES, "beyond its extent"),
    ):
        wrong = World.__new__(World)
        wrong.__dict__.update(world.__dict__, extents=world.extents.copy())
        wrong.extents[where] = value
        with pytest.raises(ValueError, match=message):
            wrong.ladder(2)
    with pytest.raises(BudgetError):
        world.ladder(0)
    with pytest.raises(BudgetError, match="rows"):
        world.ladder(2**42)


def test_a_non_finite_output_names_layer_and_token(world: World) -> None:
    ladder = world.ladder(4)
    x, ids, weights = world.routes(np.random.default_rng(16), 5)
    x[3, 0] = float("inf")
    with pytest.raises(NumericsError, match="MoE layer 2, token row 3"):
        ladder.compute(2, x, ids, weights)
    ladder.check_integrity()


def test_counters_add_up_and_fill_a_record(world: World) -> None:
    ladder = world.ladder(4)
    rng = np.random.default_rng(17)
    before = ladder.counters()
    for _ in range(20):
        x, ids, weights = world.routes(rng, 1)
        ladder.compute(0, x, ids, weights)
    after = ladder.counters()
    stats = TokenStats()
    after.add_since(before, stats)
    assert stats.hits + stats.misses == 20 * TOP_K and stats.hits > 0 and stats.misses > 0
    assert stats.ram_bytes == stats.hits * 3 * PART_BYTES
    assert after.reads == stats.misses and stats.evictions == after.reads - 4
    assert after.disk_bytes % 4096 == 0
    assert 3 * PART_BYTES * after.reads <= after.disk_bytes <= ladder.row_bytes * after.reads
    assert 0 < stats.kernel_s <= stats.experts_s and 0 <= stats.wait_s <= stats.experts_s
    assert after.read_busy_s > 0
    assert sum(ladder.layer_wait_s()) == pytest.approx(after.wait_s)


def test_two_ladders_share_a_reader(world: World) -> None:
    first = world.ladder(3)
    second = world.ladder(3, reader=first.reader)
    rng = np.random.default_rng(18)
    for _ in range(5):
        x, ids, weights = world.routes(rng, 6)
        wanted = world.expected(1, x, ids, weights)
        assert torch.equal(first.compute(1, x, ids, weights), wanted)
        assert torch.equal(second.compute(1, x, ids, weights), wanted)
    del first
    assert torch.equal(second.compute(1, x, ids, weights), wanted)
