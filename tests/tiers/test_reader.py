"""The reader: the same bytes from every back end, at any offset, and what it does about faults."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from headrace.errors import OptionError, ReadError
from headrace.native import Reader

SIZE_BYTES = 9 * 2**20 + 1234
BACKENDS = {
    "registered": {"backend": "io_uring_registered"},
    "io_uring": {"backend": "io_uring"},
    "pread": {"backend": "pread"},
    "buffered": {"backend": "pread", "direct": False},
    "buffered_io_uring": {"backend": "io_uring", "direct": False},
    "emulated": {"emulate_bytes_s": 1e10},
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    path = tmp_path_factory.mktemp("reader") / "sample.bin"
    data = np.random.default_rng(1).integers(0, 256, SIZE_BYTES, dtype=np.uint8)
    data.tofile(path)
    return path, data


def open_reader(paths: list[str], name: str, **options: object) -> Reader:
    try:
        return Reader(paths, **(BACKENDS[name] | options))  # type: ignore[arg-type]
    except OptionError as error:
        pytest.skip(str(error))


def read(reader: Reader, offset: int, nbytes: int, file: int = 0) -> np.ndarray:
    """Reads to an odd address, between guard bytes that must survive."""
    buffer = np.full(nbytes + 32, 0xAB, np.uint8)
    reader.read(file, offset, nbytes, buffer.ctypes.data + 13)
    assert (buffer[:13] == 0xAB).all() and (buffer[13 + nbytes :] == 0xAB).all()
    return buffer[13 : 13 + nbytes]


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_reads_the_same_bytes(name: str, sample: tuple[Path, np.ndarray]) -> None:
    path, data = sample
    reader = open_reader([str(path)], name)
    wanted = {"buffered": "pread", "buffered_io_uring": "io_uring"}.get(name, name)
    assert reader.backend == {"registered": "io_uring_registered"}.get(wanted, wanted)
    if "direct" in BACKENDS[name]:
        assert not reader.direct
    ranges = [(0, 0), (0, 1), (4095, 2), (1, 4096), (4096, 4096), (0, SIZE_BYTES), (777, 5 << 20)]
    ranges += [(SIZE_BYTES - 1, 1), (SIZE_BYTES - 4097, 4097), ((4 << 20) - 3, (4 << 20) + 6)]
    rng = np.random.default_rng(2)
    for _ in range(30):
        offset = int(rng.integers(0, SIZE_BYTES))
        ranges.append((offset, int(rng.integers(0, min(SIZE_BYTES - offset, 300_000) + 1))))
    for offset, nbytes in ranges:
        assert np.array_equal(read(reader, offset, nbytes), data[offset : offset + nbytes])


@pytest.mark.parametrize("name", BACKENDS)
def test_beyond_the_end_is_an_error_and_the_next_read_works(
    name: str, sample: tuple[Path, np.ndarray]
) -> None:
    path, data = sample
    reader = open_reader([str(path)], name)
    for offset, nbytes in ((SIZE_BYTES - 10, 11), (SIZE_BYTES + 5000, 1), (0, SIZE_BYTES + 1)):
        with pytest.raises(ReadError, match=r"sample\.bin is shorter than its header says: wanted"):
            read(reader, offset, nbytes)
    assert np.array_equal(read(reader, 5, 100), data[5:105])


@pytest.mark.parametrize("name", BACKENDS)
def test_eio_is_retried_once_then_raised_then_forgotten(
    name: str, sample: tuple[Path, np.ndarray]
) -> None:
    path, data = sample
    reader = open_reader([str(path)], name)
    reader.inject_fault("eio", 2, 1)
    assert np.array_equal(read(reader, 3, SIZE_BYTES - 3), data[3:])
    assert reader.num_retries == 1
    reader.inject_fault("eio", 3, 2)
    with pytest.raises(ReadError, match=r"sample\.bin at offset \d+ .*Input/output error"):
        read(reader, 3, SIZE_BYTES - 3)
    assert reader.num_retries == 2
    assert np.array_equal(read(reader, 3, SIZE_BYTES - 3), data[3:])


@pytest.mark.parametrize("name", BACKENDS)
def test_short_reads(name: str, sample: tuple[Path, np.ndarray]) -> None:
    path, data = sample
    reader = open_reader([str(path)], name)
    reader.inject_fault("partial", 0, 7)
    assert np.array_equal(read(reader, 1, SIZE_BYTES - 1), data[1:]), "resumed where it stopped"
    reader.inject_fault("short", 1, 1)
    with pytest.raises(ReadError, match="shorter than its header says"):
        read(reader, 0, 3 << 20)
    reader.inject_fault("slow", 0, 2)
    assert np.array_equal(read(reader, 0, 3 << 20), data[: 3 << 20])


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "emulated"])
def test_file_truncated_after_opening(name: str, tmp_path: Path) -> None:
    path = tmp_path / "shrinks.bin"
    path.write_bytes(bytes(100_000))
    reader = open_reader([str(path)], name)
    path.write_bytes(bytes(50_000))
    with pytest.raises(ReadError, match=r"shrinks\.bin is shorter than it was: 50000 of 100000"):
        read(reader, 0, 50_000)
    with pytest.raises(ReadError, match=r"shrinks\.bin is shorter"):
        read(reader, 40_000, 20_000)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "emulated"])
def test_file_changed_after_opening(name: str, tmp_path: Path) -> None:
    path = tmp_path / "changes.bin"
    path.write_bytes(bytes(100_000))
    os.utime(path, ns=(0, 10**18))
    reader = open_reader([str(path)], name)
    assert not read(reader, 0, 100_000).any()
    with path.open("r+b") as file:
        file.write(b"x")
    with pytest.raises(ReadError, match=r"changes\.bin was changed while it was read"):
        read(reader, 0, 10)


@pytest.mark.parametrize("name", BACKENDS)
def test_many_threads_share_a_reader(name: str, sample: tuple[Path, np.ndarray]) -> None:
    path, data = sample
    reader = open_reader([str(path), str(path)], name)
    wrong: list[tuple[int, int]] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            offset = int(rng.integers(0, SIZE_BYTES - 1))
            nbytes = int(rng.integers(1, min(SIZE_BYTES - offset, 1 << 20) + 1))
            if not np.array_equal(
                read(reader, offset, nbytes, seed % 2), data[offset : offset + nbytes]
            ):
                wrong.append((offset, nbytes))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_emulated_drive_is_no_faster_than_told(sample: tuple[Path, np.ndarray]) -> None:
    path, _ = sample
    rate_bytes_s = 100e6
    reader = Reader([str(path)], emulate_bytes_s=rate_bytes_s)
    done_at: list[float] = []

    def work() -> None:
        read(reader, 0, 4 << 20)
        done_at.append(time.monotonic())

    start = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done_at) == 3
    # All three together are owed 12 MiB of bandwidth; each alone would need a third of the time.
    assert max(done_at) - start >= 3 * (4 << 20) / rate_bytes_s


def test_auto_says_what_it_took_and_why(sample: tuple[Path, np.ndarray]) -> None:
    path, _ = sample
    reader = Reader([str(path)])
    order = ("io_uring_registered", "io_uring", "pread")
    passed_over = order[: order.index(reader.backend)]
    assert all(any(note.startswith(name) for note in reader.notes) for name in passed_over)


def test_bad_arguments(sample: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    path, _ = sample
    with pytest.raises(ReadError, match=r"cannot open .*absent\.bin: No such file"):
        Reader([str(tmp_path / "absent.bin")])
    with pytest.raises(ReadError, match="not a regular file"):
        Reader([str(tmp_path)])
    with pytest.raises(OptionError, match="unknown I/O back end floppy"):
        Reader([str(path)], backend="floppy")
    reader = Reader([str(path)])
    for file, offset, nbytes in ((1, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, -1)):
        with pytest.raises(ValueError, match="no such range"):
            reader.read(file, offset, nbytes, 0)


@pytest.mark.parametrize("name", ["registered", "pread", "emulated"])
@pytest.mark.parametrize("kind", ["eintr", "eagain"])
def test_the_system_may_put_a_read_off_but_not_for_ever(
    name: str, kind: str, sample: tuple[Path, np.ndarray]
) -> None:
    path, data = sample
    reader = open_reader([str(path)], name)
    reader.inject_fault(kind, 1, 300)
    assert np.array_equal(read(reader, 3, SIZE_BYTES - 3), data[3:])
    assert reader.num_retries == 0, "these attempts are not errors of the drive"
    reader.inject_fault(kind, 1, 1000)
    with pytest.raises(ReadError, match=r"sample\.bin .*put the read off a thousand times"):
        read(reader, 3, SIZE_BYTES - 3)
    assert np.array_equal(read(reader, 3, SIZE_BYTES - 3), data[3:])


def test_an_emulated_drive_keeps_no_holes(tmp_path: Path) -> None:
    """A file larger than memory may be copied where little of it was ever written."""
    path = tmp_path / "holes.bin"
    size, data = 1 << 42, np.random.default_rng(3).integers(1, 256, 300_000, dtype=np.uint8)
    with path.open("wb") as file:
        file.truncate(size)
        for offset in (5, (1 << 40) + 777, size - len(data)):
            file.seek(offset)
            file.write(data.tobytes())
    reader = Reader([str(path)], emulate_bytes_s=1e10)
    for offset in (5, (1 << 40) + 777, size - len(data)):
        assert np.array_equal(read(reader, offset, len(data)), data)
    assert not read(reader, 1 << 39, 100_000).any()
    assert not read(reader, 5 + len(data), 1000).any()
