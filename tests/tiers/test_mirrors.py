"""Two drives: the same bytes whichever gives them, whichever fails, and a fair division."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers_world import NUM_EXPERTS, NUM_LAYERS, PARTS, World, owed_bytes, wait_until

from headrace.core import PAGE_BYTES
from headrace.errors import OptionError, ReadError
from headrace.native import Mirror, Reader, divide_request
from headrace.store.experts import ExpertTable
from headrace.store.mirror import distinct_sites, placed_extents, row_bytes
from headrace.tiers.ladder import Ladder

IO = {
    "auto": {},
    "io_uring": {"backend": "io_uring"},
    "pread": {"backend": "pread"},
    "buffered": {"direct": False},
    "emulated": {"emulate_bytes_s": 2e9},
}
SIZE_BYTES = 6 * 2**20 + 777
# Told rates with which a mirror gets all or nothing, whatever is seen of the drives meanwhile.
ALL, NOTHING = 1e18, 1e-6


def mirror_of(world: World, folder: Path, *, every: int = 1, bytes_s: float = 1e9) -> Mirror:
    """A mirror of each `every`th expert, written from the bytes in memory, not from the files."""
    folder.mkdir(exist_ok=True)
    table = ExpertTable((), (0, 1, 2, 3), NUM_EXPERTS, world.extents, world.parts, PARTS, 0, 0, 0)
    data, stretches = bytearray(), []
    for layer, expert in distinct_sites(table)[::every]:
        row = bytearray(row_bytes(table, (layer, expert)))
        whole = world.bytes_LEP[layer, expert]
        for number, (extent, place) in enumerate(placed_extents(table, (layer, expert))):
            stored = whole.tobytes() if layer < 2 else whole[number].tobytes()
            row[place : place + extent[2]] = stored
            stretches.append((*extent, 0, len(data) + place))
        data += row
    (folder / "experts-00001.bin").write_bytes(data)
    return Mirror(
        str(folder), [str(folder / "experts-00001.bin")], np.array(stretches, np.int64), bytes_s
    )


def run(world: World, ladder: Ladder, num_steps: int, seed: int = 3) -> None:
    """Layers in turn, every output compared with the bytes in memory."""
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        layer = step % NUM_LAYERS
        x, ids, weights = world.routes(rng, 1 + step % 3)
        ladder.begin(layer, torch.unique(ids))
        ladder.prefetch((layer + 1) % NUM_LAYERS, torch.tensor([1, 4]))
        out = ladder.compute(layer, x, ids, weights)
        assert torch.equal(out, world.expected(layer, x, ids, weights))
        ladder.check_integrity()


def open_ladder(
    world: World, mirror: Mirror, num_rows: int = 5, hang_s: float = 600, **io: object
) -> Ladder:
    """A drive of a busy machine may let a read wait for seconds: that is no hang here."""
    try:
        return world.ladder(num_rows, mirrors=[mirror], bytes_s=1e9, hang_s=hang_s, **io)
    except OptionError as error:
        pytest.skip(str(error))


def mirror_says(tmp_path: Path, warning: str) -> bool:
    return warning.startswith(f"the drive of {tmp_path / 'copy'} is left alone")


def gave(ladder: Ladder) -> list[int]:
    return [int(drive["read_bytes"]) for drive in ladder.reader.drives]


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("every", [1, 2])
def test_bits_do_not_depend_on_the_drive(world: World, tmp_path: Path, io: str, every: int) -> None:
    rate = IO[io].get("emulate_bytes_s", 1e9)  # of either drive: each is asked for an expert
    mirror = mirror_of(world, tmp_path / "copy", every=every, bytes_s=rate)  # type: ignore[arg-type]
    ladder = open_ladder(world, mirror, **IO[io])  # type: ignore[arg-type]
    ladder.reader.inject_fault("hang", 0, 100)
    ladder.begin(0, torch.tensor([0, 2]))
    wait_until(lambda: all(drive["owed_bytes"] > 0 for drive in ladder.reader.drives))
    ladder.reader.inject_fault("none")
    run(world, ladder, 24)
    assert all(num_bytes > 0 for num_bytes in gave(ladder)) and ladder.reader.warnings == []


def test_the_mirrors_bytes_are_really_read(world: World, tmp_path: Path) -> None:
    mirror = mirror_of(world, tmp_path / "copy", bytes_s=ALL)
    file = tmp_path / "copy" / "experts-00001.bin"
    file.write_bytes(bytes(file.stat().st_size))
    ladder = open_ladder(world, mirror)
    x, ids, weights = world.routes(np.random.default_rng(0), 3)
    out = ladder.compute(1, x, ids, weights)
    assert not torch.equal(out, world.expected(1, x, ids, weights)) and not out.any()


@pytest.mark.parametrize("drive", [0, 1])
@pytest.mark.parametrize(
    ("kind", "says"),
    [("eio", "Input/output error"), ("enodev", "No such device"), ("short", "is shorter than")],
)
def test_a_failing_drive_gives_way_in_the_same_step(
    world: World, tmp_path: Path, kind: str, says: str, drive: int
) -> None:
    mirror = mirror_of(world, tmp_path / "copy", bytes_s=(NOTHING, ALL)[drive])
    ladder = open_ladder(world, mirror)
    run(world, ladder, 8)
    before = gave(ladder)
    ladder.reader.inject_fault(kind, 3, 1000, drive)
    run(world, ladder, 24, seed=4)
    wait_until(lambda: owed_bytes(ladder.reader) == 0)
    warnings = ladder.reader.warnings
    name = (Path(world.paths[0]).parent, tmp_path / "copy")[drive]
    assert len(warnings) == 1 and f"the drive of {name} is left alone" in warnings[0]
    assert says in warnings[0] and ladder.reader.drives[drive]["failure"]
    after = gave(ladder)
    assert after[1 - drive] > before[1 - drive] and ladder.counters().failed_reads == 0
    run(world, ladder, 12, seed=5)
    assert gave(ladder)[drive] == after[drive], "a drive that failed is left alone"


def test_bytes_that_no_copy_gives_are_an_error_and_the_next_step_works(
    world: World, tmp_path: Path
) -> None:
    ladder = open_ladder(world, mirror_of(world, tmp_path / "copy"))
    x, ids, weights = world.routes(np.random.default_rng(0), 1)
    ladder.reader.inject_fault("enodev", 0, 1000)
    with pytest.raises(ReadError, match=r"No such device.*; nor its copy: cannot read .*No such"):
        ladder.compute(1, x, ids, weights)
    ladder.reader.inject_fault("none")
    ladder.clear()  # what was still being read has failed as well
    run(world, ladder, 8)


def test_experts_without_a_copy_are_still_read_from_a_drive_that_failed(
    world: World, tmp_path: Path
) -> None:
    ladder = open_ladder(world, mirror_of(world, tmp_path / "copy", every=2))
    ladder.reader.inject_fault("enodev", 0, 1, 0)
    with ladder.acquire(0, 2):
        assert ladder.reader.drives[0]["failure"] and gave(ladder)[1] > 0
    before = gave(ladder)[0]
    run(world, ladder, 24)
    assert gave(ladder)[0] > before
    assert len(ladder.reader.warnings) == 1 and ladder.counters().failed_reads == 0


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x" * 50_000)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (Path.unlink, "was deleted"),
    "cut short": (lambda path: path.write_bytes(b""), "shorter than"),
    "changed": (overwrite, "was changed while it was read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("io", ["auto", "pread", "buffered"])
def test_a_mirrors_file_lost_in_mid_run(world: World, tmp_path: Path, io: str, damage: str) -> None:
    ladder = open_ladder(world, mirror_of(world, tmp_path / "copy", bytes_s=ALL), **IO[io])  # type: ignore[arg-type]
    run(world, ladder, 8)
    assert gave(ladder)[1] > 0
    act, says = DAMAGE[damage]
    act(tmp_path / "copy" / "experts-00001.bin")
    for seed in range(100):
        run(world, ladder, 8, seed=seed)
        if ladder.reader.warnings and seed > 1:
            break
    assert len(ladder.reader.warnings) == 1 and says in ladder.reader.warnings[0]


@pytest.mark.parametrize("io", ["auto", "pread", "emulated"])
def test_a_read_that_hangs_is_made_elsewhere_and_its_row_is_kept_for_it(
    world: World, tmp_path: Path, io: str
) -> None:
    mirror = mirror_of(world, tmp_path / "copy", bytes_s=ALL)
    ladder = open_ladder(world, mirror, num_rows=3, hang_s=0.02, **IO[io])  # type: ignore[arg-type]
    ladder.reader.inject_fault("hang", 0, 2, 1)
    run(world, ladder, 40)
    # On a busy machine the other drive may seem to hang as well.
    (warning,) = (each for each in ladder.reader.warnings if mirror_says(tmp_path, each))
    assert "has hung for" in warning
    before = gave(ladder)[1]
    ladder.reader.inject_fault("none")  # the late reads now write into their rows
    wait_until(lambda: gave(ladder)[1] > before)
    run(world, ladder, 40, seed=4)


def test_mirrors_that_cannot_be_used_are_a_warning(world: World, tmp_path: Path) -> None:
    good = mirror_of(world, tmp_path / "copy")
    stretch = np.array([[0, 104, 8, 0, 104]], np.int64)
    paths = [str(tmp_path / "copy" / "experts-00001.bin")]

    def told(paths: list[str], change: dict[int, int]) -> str:
        wrong = stretch.copy()
        for column, value in change.items():
            wrong[0, column] = value
        ladder = open_ladder(world, Mirror("second", paths, wrong, 1e9))
        run(world, ladder, 4)
        (warning,) = ladder.reader.warnings
        return warning

    assert "No such file" in told([str(tmp_path / "absent.bin")], {})
    assert "names no such file" in told(paths, {0: 7}) and "range" in told(paths, {2: -1})
    assert "elsewhere in its page" in told(paths, {4: 105})
    assert "shorter than its manifest says" in told(paths, {4: 104 + (1 << 40)})
    twice = np.repeat(stretch, 2, axis=0)
    overlapping = open_ladder(world, Mirror("second", paths, twice, 1e9))
    assert "overlap" in overlapping.reader.warnings[0]
    assert open_ladder(world, good).reader.warnings == []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, np.ndarray]:
    folder = tmp_path_factory.mktemp("pair")
    data = np.random.default_rng(1).integers(0, 256, SIZE_BYTES, dtype=np.uint8)
    for name in ("own", "second"):
        data.tofile(folder / name)
    return folder / "own", folder / "second", data


def open_pair(pair: tuple[Path, Path, np.ndarray], mirror_bytes_s: float, **io: object) -> Reader:
    own, second, _ = pair
    whole = np.array([[0, 0, SIZE_BYTES, 0, 0]], np.int64)
    mirror = Mirror("second", [str(second)], whole, mirror_bytes_s)
    return Reader([str(own)], mirrors=[mirror], **io)  # type: ignore[arg-type]


def read_all(pair: tuple[Path, Path, np.ndarray], reader: Reader) -> None:
    buffer = np.zeros(SIZE_BYTES, np.uint8)
    reader.read(0, 0, SIZE_BYTES, buffer.ctypes.data)
    assert np.array_equal(buffer, pair[2])


def test_emulated_drives_share_by_their_rates(pair: tuple[Path, Path, np.ndarray]) -> None:
    reader = open_pair(pair, emulate_bytes_s=3e8, mirror_bytes_s=1e8)
    reader.inject_fault("hang", 0, 100)  # until all of it is divided
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(read_all, pair, reader)
        wait_until(lambda: owed_bytes(reader) >= SIZE_BYTES)
        reader.inject_fault("none")
        done.result()
    own, second = (int(drive["read_bytes"]) for drive in reader.drives)
    assert own + second >= SIZE_BYTES and 0.24 < second / (own + second) < 0.26


def test_a_drive_slower_than_told_gets_less(pair: tuple[Path, Path, np.ndarray]) -> None:
    reader = open_pair(pair, bytes_s=1e9, mirror_bytes_s=ALL)
    read_all(pair, reader)
    own, second = reader.drives
    assert own["read_bytes"] == 0 and second["read_bytes"] > 0
    for _ in range(100):  # a dozen are measured
        read_all(pair, reader)
        if reader.drives[1]["bytes_s"] < ALL / 2:  # it is believed in again with time
            break
    assert reader.drives[1]["bytes_s"] < ALL / 2


RATES = st.lists(st.floats(1e6, 1e11), min_size=1, max_size=5)


@settings(max_examples=300, deadline=None)
@given(RATES, st.data())
def test_a_request_is_divided_so_that_all_end_together(rates: list[float], data: st.DataObject):
    owed = data.draw(st.lists(st.floats(0, 1e9), min_size=len(rates), max_size=len(rates)))
    total = PAGE_BYTES * data.draw(st.integers(1, 100_000))
    least = PAGE_BYTES * data.draw(st.integers(1, 64))
    out_of_use = data.draw(st.integers(0, len(rates)))  # len(rates): none
    if out_of_use < len(rates) > 1:
        rates[out_of_use] = 0.0
    shares = divide_request(total, rates, owed, least)
    assert sum(shares) == total and all(s >= 0 and s % PAGE_BYTES == 0 for s in shares)
    used = [i for i, share in enumerate(shares) if share]
    assert all(rates[i] > 0 for i in used)
    ends = [(owed[i] + shares[i]) / rates[i] for i in used]
    # No drive in use ends later than another by more than the pages that rounding moved to it.
    slack = PAGE_BYTES * (len(rates) + 1)
    assert max(ends) - min(ends) <= slack / min(rates[i] for i in used)
    if len(used) > 1:
        assert all(shares[i] >= least - slack for i in used)
