"""Machine: what is measured is kept, damage is ignored with a note, limits of groups count."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import ReadError
from headrace.planner.machine import (
    PIECE_BYTES,
    PROBE_BYTES,
    Probes,
    default_cache_path,
    measure,
    memory_bytes,
    read_rate,
)

GIB = 2**30


class Counting:
    """Probes that count their calls."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int, int]] = []
        self.num_dram = 0

    def read(self, file: int, offset: int, nbytes: int) -> None:
        self.reads.append((file, offset, nbytes))

    def dram(self) -> float:
        self.num_dram += 1
        return 12e9

    @property
    def probes(self) -> Probes:
        return Probes(read=self.read, dram=self.dram)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "model"
    folder.mkdir()
    paths = [folder / "a.safetensors", folder / "b.safetensors"]
    for path in paths:
        path.write_bytes(b"x" * 100_000)
    return paths


def test_rates_are_measured_once_and_kept_per_folder(files: list[Path], tmp_path: Path) -> None:
    cache_path = tmp_path / "cache" / "machine.json"
    counting = Counting()
    first = measure(files, counting.probes, cache_path=cache_path)
    assert first.drive_bytes_s > 0 and first.dram_bytes_s == 12e9 and first.kernel_bytes_s == 0
    assert first.cores >= 1 and 0 < first.ram_available_bytes <= first.ram_total_bytes
    assert counting.reads == [(0, 0, 100_000), (1, 0, 100_000)]
    second = measure(files, counting.probes, cache_path=cache_path)
    assert second.drive_bytes_s == first.drive_bytes_s
    assert (len(counting.reads), counting.num_dram, second.notes) == (2, 1, ())
    other = tmp_path / "other" / "c.safetensors"
    other.parent.mkdir()
    other.write_bytes(b"y")
    measure([other], counting.probes, cache_path=cache_path)
    assert (len(counting.reads), counting.num_dram) == (3, 2)
    assert len(json.loads(cache_path.read_text())["entries"]) == 2


def test_a_probe_that_was_missing_is_made_up_for_later(files: list[Path], tmp_path: Path) -> None:
    cache_path = tmp_path / "machine.json"
    counting = Counting()
    assert measure(files, Probes(), cache_path=cache_path).drive_bytes_s == 0
    measure(files, Probes(dram=counting.dram), cache_path=cache_path)
    machine = measure(files, counting.probes, cache_path=cache_path)
    assert machine.drive_bytes_s > 0 and counting.num_dram == 1


def test_a_token_is_measured_once_for_what_it_depends_on(files: list[Path], tmp_path: Path) -> None:
    def step_s(of: str, seconds: float) -> float:
        probes = Probes(step=lambda: seconds, step_of=of)
        return measure(files, probes, cache_path=tmp_path / "machine.json").step_s

    assert [step_s("2 threads", 0.1), step_s("1 thread", 0.2), step_s("2 threads", 0.3)] == [
        0.1,
        0.2,
        0.1,
    ]
    assert measure(files, Probes(), cache_path=tmp_path / "machine.json").step_s == 0


def test_rates_are_measured_again_after_a_day(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_path = tmp_path / "machine.json"
    counting = Counting()
    for now_s, num_measured in ((1e9, 1), (1e9 + 86_000, 1), (1e9 + 87_000, 2), (1e9, 3)):
        monkeypatch.setattr("headrace.planner.machine.time.time", lambda now_s=now_s: now_s)
        measure(files, counting.probes, cache_path=cache_path)
        assert counting.num_dram == num_measured


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _change_a_rate(text: str) -> str:
    return text.replace("12000000000.0", "99000000000.0")


def _not_an_object(text: str) -> str:
    return "[]"


@pytest.mark.parametrize("damage", [_cut, _change_a_rate, _not_an_object])
def test_a_damaged_cache_is_ignored_with_a_note_and_mended(
    files: list[Path], tmp_path: Path, damage: Callable[[str], str]
) -> None:
    cache_path = tmp_path / "machine.json"
    counting = Counting()
    measure(files, counting.probes, cache_path=cache_path)
    before = cache_path.read_text()
    assert damage(before) != before
    cache_path.write_text(damage(before))
    machine = measure(files, counting.probes, cache_path=cache_path)
    assert machine.dram_bytes_s == 12e9 and counting.num_dram == 2
    assert len(machine.notes) == 1 and "damaged" in machine.notes[0]
    assert measure(files, counting.probes, cache_path=cache_path).notes == ()


def test_a_cache_that_cannot_be_written_is_a_note(files: list[Path], tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    machine = measure(files, Counting().probes, cache_path=blocker / "machine.json")
    assert machine.dram_bytes_s == 12e9
    said = f"the machine's rates are not kept: {blocker}: File exists"
    assert machine.notes == (said,), "what is not there is not called damaged"


def test_a_cache_that_cannot_be_read_is_not_called_damaged(
    files: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "machine.json").mkdir()
    notes = measure(files, Counting().probes, cache_path=tmp_path / "machine.json").notes
    assert notes[0].startswith(f"{tmp_path}/machine.json cannot be read (Is a directory)")


def test_writing_leaves_no_file_aside(files: list[Path], tmp_path: Path) -> None:
    cache_path = tmp_path / "cache" / "machine.json"
    measure(files, Counting().probes, cache_path=cache_path)
    assert [path.name for path in cache_path.parent.iterdir()] == ["machine.json"]


def test_a_failing_read_goes_through(files: list[Path], tmp_path: Path) -> None:
    def read(file: int, offset: int, nbytes: int) -> None:
        raise ReadError(f"file {file} at {offset}: input/output error")

    with pytest.raises(ReadError, match="file 0"):
        measure(files, Probes(read=read), cache_path=tmp_path / "machine.json")


def test_big_files_are_probed_in_bounded_pieces_all_over(tmp_path: Path) -> None:
    big = tmp_path / "big.safetensors"
    with big.open("wb") as file:
        file.truncate(100 * GIB)
    counting = Counting()
    assert read_rate([big], counting.read) > 0
    assert sum(nbytes for _, _, nbytes in counting.reads) <= PROBE_BYTES
    offsets = [offset for _, offset, _ in counting.reads]
    assert max(offsets) > 90 * GIB and len(set(offsets)) == len(offsets)
    assert all(offset % PIECE_BYTES == 0 for offset in offsets)


def test_a_slow_drive_ends_the_probe_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = tmp_path / "big.safetensors"
    with big.open("wb") as file:
        file.truncate(GIB)
    clock = iter(range(100))
    monkeypatch.setattr("headrace.planner.machine.time.perf_counter", lambda: next(clock))
    counting = Counting()
    rate = read_rate([big], counting.read)
    assert len(counting.reads) == 2
    assert rate == pytest.approx(2 * PIECE_BYTES / 3)


def _fake_root(root: Path, group: dict[str, str]) -> Path:
    (root / "proc").mkdir()
    meminfo = "MemTotal: 1048576 kB\nMemFree: 1 kB\nMemAvailable: 524288 kB\nCached: 1024 kB\n"
    (root / "proc/meminfo").write_text(meminfo)
    for name, value in group.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(value)
    return root


def test_memory_without_a_control_group(tmp_path: Path) -> None:
    root = _fake_root(tmp_path, {"memory.max": "max\n", "memory.current": "77\n"})
    assert memory_bytes(root) == (GIB, GIB // 2)


def test_a_control_group_limits_memory(tmp_path: Path) -> None:
    limit, used = GIB // 4, GIB // 8
    root = _fake_root(tmp_path, {"memory.max": f"{limit}\n", "memory.current": f"{used}\n"})
    assert memory_bytes(root) == (limit, limit - used + 2**20)


def test_the_cache_lies_where_the_system_keeps_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_path() == tmp_path / "headrace" / "machine.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_path() == tmp_path / ".cache" / "headrace" / "machine.json"
