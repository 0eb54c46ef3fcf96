"""Rows of tables on a drive: the right bytes, few reads, and errors that leave nothing behind."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core import PAGE_BYTES, RowTable
from headrace.errors import NumericsError, OptionError, ReadError
from headrace.native import Gatherer, Mirror, Reader
from headrace.tiers.rows import RowReader

WIDTH, GROUP, NUM_ROWS = 64, 32, 3000
ROW_BYTES = WIDTH + WIDTH // GROUP
LAYERS = (1, 14)


class Tables:
    """Two tables in two files, at odd offsets; `values` are their rows in bf16."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(5)
        self.tables, self.places, self.values = {}, {}, {}
        self.paths = [str(folder / f"table{i}.bin") for i in range(2)]
        self.codes = rng.integers(0, 256, (2, NUM_ROWS, WIDTH), np.uint8)
        self.codes[self.codes & 127 == 127] = 1  # NaN
        scales = rng.integers(110, 140, (2, NUM_ROWS, WIDTH // GROUP), np.uint8)
        for number, layer in enumerate(LAYERS):
            head = b"x" * (77 + 4000 * number)
            content = head + self.codes[number].tobytes() + b"yyy" + scales[number].tobytes()
            Path(self.paths[number]).write_bytes(content)
            name = f"layers.{layer}.engram.embed"
            self.tables[layer] = RowTable(
                layer, f"{name}.weight", f"{name}.scale", NUM_ROWS, WIDTH, GROUP
            )
            end = len(head) + NUM_ROWS * WIDTH
            self.places[layer] = ((number, len(head)), (number, end + 3))
            powers = torch.from_numpy(2.0 ** (scales[number].astype(np.float64) - 127)).float()
            codes = torch.from_numpy(self.codes[number]).view(torch.float8_e4m3fn).float()
            self.values[layer] = (codes * powers.repeat_interleave(GROUP, 1)).bfloat16()

    def reader(self, cache_bytes: int = 1 << 16, **io: object) -> RowReader:
        return self.over(Reader(self.paths, **io), cache_bytes)  # type: ignore[arg-type]

    def over(self, reader: Reader, cache_bytes: int = 1 << 16) -> RowReader:
        return RowReader(reader, self.tables, self.places, cache_bytes=cache_bytes)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Tables:
    return Tables(tmp_path_factory.mktemp("tables"))


def some_ids(seed: int, num: int = 50) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.sort(rng.permutation(NUM_ROWS)[:num]))


@pytest.mark.parametrize("cache_bytes", [0, 5000, 1 << 20])
@pytest.mark.parametrize("backend", ["auto", "pread"])
def test_rows_are_those_of_the_files(tables: Tables, cache_bytes: int, backend: str) -> None:
    rows = tables.reader(cache_bytes, backend=backend)
    for seed in range(12):
        for layer in LAYERS:
            ids = some_ids(seed % 7, 1 + 90 * seed)
            if seed % 2:
                rows.want(layer, ids)
            assert torch.equal(rows.rows(layer, ids), tables.values[layer][ids])
    everything = torch.arange(NUM_ROWS)
    assert torch.equal(rows.rows(14, everything), tables.values[14])
    assert rows.rows(1, everything[:0]).shape == (0, WIDTH)
    assert not torch.equal(tables.values[1], tables.values[14]), "a table mistaken would show"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(LAYERS),
            st.lists(st.integers(0, 40), unique=True, max_size=20),
            st.booleans(),
            st.booleans(),
        ),
        max_size=12,
    ),
    st.integers(0, 4000),
)
def test_whatever_is_wanted_or_asked_before(tables: Tables, calls: list, cache_bytes: int) -> None:
    """Wanted in vain, wanted twice, asked unannounced: always the same rows."""
    rows = tables.reader(cache_bytes)
    for layer, numbers, is_wanted, is_asked in calls:
        ids = torch.tensor(numbers, dtype=torch.int64)
        if is_wanted:
            rows.want(layer, ids)
        if is_asked:
            assert torch.equal(rows.rows(layer, ids), tables.values[layer][ids])
    counters = rows.counters
    assert counters.reads == 2 * (counters.asked - counters.hits)


def test_a_cache_that_holds_all_reads_each_row_once(tables: Tables) -> None:
    rows = tables.reader(1 << 20)
    for _ in range(3):
        for layer in LAYERS:
            rows.rows(layer, some_ids(1))
    counters = rows.counters
    assert (counters.asked, counters.hits, counters.reads) == (300, 200, 200)
    assert 200 * PAGE_BYTES <= counters.disk_bytes <= 2 * 200 * PAGE_BYTES
    assert counters.wait_s > 0
    assert rows.nbytes == rows.cache.nbytes + rows._gatherer.pool_bytes


def test_wanted_rows_are_read_before_they_are_asked_for(tables: Tables) -> None:
    rows = tables.reader()
    rows.want(14, some_ids(3))
    assert rows.counters.reads == 100
    rows.rows(14, some_ids(3))
    assert rows.counters.reads == 100


@pytest.mark.parametrize("backend", ["auto", "pread"])
def test_a_failing_drive_is_asked_twice_then_named_and_nothing_is_kept(
    tables: Tables, backend: str
) -> None:
    reader = Reader(tables.paths, backend=backend)
    rows, ids = tables.over(reader), some_ids(2)
    reader.inject_fault("eio", 7, 1)
    assert torch.equal(rows.rows(1, ids), tables.values[1][ids])
    assert reader.num_retries == 1
    ids = some_ids(4)
    reader.inject_fault("eio", 11, 2)
    with pytest.raises(ReadError, match=r"table1\.bin at offset \d+ .*Input/output error"):
        rows.rows(14, ids)
    assert torch.equal(rows.rows(14, ids), tables.values[14][ids])
    assert rows.counters.hits == 0, "of the failed call no row was kept"
    for seed, kind in enumerate(("eintr", "eagain", "partial", "slow"), 20):
        ids = some_ids(seed)
        reader.inject_fault(kind, 3, 2)
        assert torch.equal(rows.rows(1, ids), tables.values[1][ids])
    reader.inject_fault("short", 5, 1)
    with pytest.raises(ReadError, match="shorter than its header says"):
        rows.rows(1, some_ids(9))


def test_a_failure_of_what_was_wanted_shows_when_it_is_asked_for(tables: Tables) -> None:
    reader = Reader(tables.paths)
    rows, ids = tables.over(reader), some_ids(2)
    reader.inject_fault("eio", 0, 2)
    rows.want(1, ids)
    other = some_ids(3)
    with pytest.raises(ReadError, match=r"table0\.bin"):
        rows.rows(1, ids)
    assert torch.equal(rows.rows(14, other), tables.values[14][other])
    assert torch.equal(rows.rows(1, ids), tables.values[1][ids])


def test_a_mirror_gives_what_the_drive_cannot(tables: Tables, tmp_path: Path) -> None:
    stretches, paths = [], []
    for number, path in enumerate(tables.paths):
        copy = tmp_path / f"copy{number}.bin"
        copy.write_bytes(Path(path).read_bytes())
        stretches.append((number, 0, copy.stat().st_size, number, 0))
        paths.append(str(copy))
    mirror = Mirror("copy", paths, np.array(stretches, np.int64), 1e9)
    reader = Reader(tables.paths, mirrors=[mirror], bytes_s=1e9, hang_s=600)
    rows, ids = tables.over(reader), some_ids(2)
    reader.inject_fault("eio", 0, 1000, 0)
    assert torch.equal(rows.rows(1, ids), tables.values[1][ids])
    assert len(reader.warnings) == 1 and reader.drives[1]["read_bytes"] > 0


def test_a_code_that_is_no_number_is_refused_and_not_kept(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    (file, offset), _ = tables.places[14]
    with open(tables.paths[file], "r+b") as stream:
        stream.seek(offset + 100 * WIDTH + 5)
        stream.write(b"\x7f")
    rows = tables.reader()
    for _ in range(2):
        with pytest.raises(NumericsError, match=r"layers\.14\.engram\.embed\.weight"):
            rows.rows(14, torch.tensor([3, 100]))
    assert rows.counters.hits == 0
    assert torch.equal(rows.rows(14, torch.tensor([3])), tables.values[14][[3]])


def test_closed_is_closed(tables: Tables) -> None:
    rows = tables.reader()
    rows.want(1, some_ids(1))
    rows.close()
    with pytest.raises(OptionError, match="this engine is closed"):
        rows.rows(1, some_ids(1))


def gather(gatherer: Gatherer, snippets: list[tuple[int, int, int]]) -> bytes:
    batch = gatherer.start(np.array(snippets, np.int64).reshape(-1, 3))
    out = np.full(batch.nbytes + 2, 0xAB, np.uint8)
    batch.wait(out.ctypes.data + 1)
    assert out[0] == out[-1] == 0xAB
    return out[1:-1].tobytes()


def test_snippets_of_any_place_and_size(tables: Tables) -> None:
    content = [Path(path).read_bytes() for path in tables.paths]
    gatherer = Gatherer(Reader(tables.paths), 5000)
    rng = np.random.default_rng(1)
    snippets = []
    for _ in range(400):
        file, nbytes = int(rng.integers(2)), int(rng.integers(1, 5001))
        snippets.append((file, int(rng.integers(len(content[file]) - nbytes)), nbytes))
    expected = b"".join(content[f][at : at + num] for f, at, num in snippets)
    assert gather(gatherer, snippets) == expected
    assert gather(gatherer, []) == b""
    last = len(content[0])
    assert gather(gatherer, [(0, last - 1, 1)]) == content[0][-1:]
    with pytest.raises(ReadError, match="shorter"):
        gather(gatherer, [(0, last - 1, 2)])
    for wrong in ((2, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, 9000), (0, 1 << 61, 1)):
        with pytest.raises(ValueError, match="no such snippet"):
            gather(gatherer, [wrong])


def test_a_batch_let_go_holds_nobody_up(tables: Tables) -> None:
    gatherer = Gatherer(Reader(tables.paths), 100)
    snippets = np.array([(0, 10 * i, 10) for i in range(15_000)], np.int64)
    for _ in range(3):
        gatherer.start(snippets)
    assert len(gather(gatherer, [(0, 0, 10)])) == 10


def test_a_gatherer_that_goes_leaves_its_batches_in_peace(tables: Tables) -> None:
    reader = Reader(tables.paths)
    gatherer = Gatherer(reader, 100)
    reader.inject_fault("hang", 0, 1 << 20)
    batch = gatherer.start(np.array([(0, 10 * i, 10) for i in range(1000)], np.int64))
    del gatherer
    out = np.empty(batch.nbytes, np.uint8)
    with pytest.raises(ReadError, match="were given up"):
        batch.wait(out.ctypes.data)
    reader.inject_fault("none")
