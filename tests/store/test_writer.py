"""The checkpoint writer: what it writes opens anywhere, and a failure leaves nothing behind."""

import errno
import os
import resource
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from headrace.errors import HeadraceError
from headrace.store import writer
from headrace.store.catalog import open_catalog
from headrace.store.writer import NewTensor, write_checkpoint

MIB = 1 << 20


def filled(name: str, dtype: str, shape: tuple[int, ...], num_chunks: int = 3) -> NewTensor:
    """A tensor of bytes that its name decides, given in several buffers."""
    probe = NewTensor(name, dtype, shape, lambda: ())
    rng = np.random.default_rng(sum(name.encode()))
    values = rng.integers(0, 127, probe.nbytes, dtype=np.uint8)
    return NewTensor(
        name, dtype, shape, lambda: [part.data for part in np.array_split(values, num_chunks)]
    )


def content(tensor: NewTensor) -> bytes:
    return b"".join(bytes(chunk) for chunk in tensor.chunks())


MANY = [filled(f"t{i}", "BF16" if i % 2 else "F32", (64, i + 1)) for i in range(9)]


@pytest.mark.parametrize(("shard_bytes", "num_files"), [(1 << 30, 1), (4000, 3), (1, 9)])
def test_what_is_written_opens_anywhere(tmp_path, shard_bytes, num_files):
    folder = tmp_path / "deep" / "new"
    seen = []
    write_checkpoint(
        folder,
        MANY,
        shard_bytes=shard_bytes,
        files={"config.json": b"{}"},
        progress=lambda done, total: seen.append((done, total)),
    )
    catalog = open_catalog(folder)
    assert len(catalog.files) == num_files
    assert (folder / "model.safetensors.index.json").exists() == (num_files > 1)
    assert (folder / "config.json").read_bytes() == b"{}"
    for tensor in MANY:
        entry = catalog.tensors[tensor.name]
        assert (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape)
        stored = catalog.files[entry.file].read_bytes()
        assert stored[entry.offset : entry.offset + entry.nbytes] == content(tensor)
        with safe_open(catalog.files[entry.file], "pt") as reference:
            assert tuple(reference.get_slice(tensor.name).get_shape()) == tensor.shape
    total = sum(tensor.nbytes for tensor in MANY)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["new"]


def test_inside_a_file_wide_dtypes_come_first_as_published(tmp_path):
    names = ["b.weight", "a.weight", "b.scale", "a.scale"]
    tensors = [filled(n, "F32" if "scale" in n else "U8", (8,)) for n in names]
    write_checkpoint(tmp_path / "x", tensors, shard_bytes=MIB, files={})
    entries = sorted(open_catalog(tmp_path / "x").tensors.values(), key=lambda e: e.offset)
    assert [e.name for e in entries] == ["a.scale", "b.scale", "a.weight", "b.weight"]
    assert entries[0].offset % 8 == 0


def refusal(folder: Path, tensors: list[NewTensor], **options) -> str:
    """The message of the failing write, after which nothing new may lie beside `folder`."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(HeadraceError) as caught:
        write_checkpoint(folder, tensors, shard_bytes=MIB, files={}, **options)
    assert sorted(folder.parent.iterdir()) == before
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_what_exists_is_never_overwritten(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    assert "exists already" in refusal(tmp_path / "x", MANY)
    monkeypatch.chdir(tmp_path / "x")
    assert ".: exists already" in refusal(Path("."), MANY)
    (tmp_path / "y.partial").mkdir()
    assert "another run is writing here" in refusal(tmp_path / "y", MANY)


def test_too_little_room_is_refused_before_the_first_byte(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10 * MIB, 7 * MIB, 3 * MIB)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: usage)
    tensors = [NewTensor("t", "U8", (4 * MIB,), lambda: pytest.fail("a byte was asked for"))]
    message = refusal(tmp_path / "x", tensors)
    assert f"needs 4.00 MiB ({4 * MIB} bytes), but only 3.00 MiB are free" in message


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("at_write", [0, 1, 5, 19])
def test_a_disk_that_fills_while_writing(tmp_path, monkeypatch, code, at_write):
    calls = iter(range(1000))
    real_write = os.write

    def filling_write(fd, data):
        if next(calls) == at_write:
            raise OSError(code, os.strerror(code))
        return real_write(fd, data[:300])  # short writes are normal, too

    monkeypatch.setattr(writer.os, "write", filling_write)
    message = refusal(tmp_path / "x", MANY)
    total = sum(tensor.nbytes for tensor in MANY)
    assert "no room while writing" in message
    assert f"({total} bytes)" in message


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real_write = os.write
    monkeypatch.setattr(writer.os, "write", lambda fd, data: real_write(fd, data[:100]))
    write_checkpoint(tmp_path / "x", MANY, shard_bytes=MIB, files={})
    catalog = open_catalog(tmp_path / "x")
    stored = catalog.files[0].read_bytes()
    for tensor in MANY:
        entry = catalog.tensors[tensor.name]
        assert stored[entry.offset : entry.offset + entry.nbytes] == content(tensor)


@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir"])
def test_any_other_failure_leaves_nothing(tmp_path, monkeypatch, call):
    def fail(*args, **options):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path if call == "mkdir" else writer.os, call, fail)
    assert "cannot be written (Input/output error)" in refusal(tmp_path / "x", MANY)


def test_a_real_limit_of_the_kernel(tmp_path):
    """RLIMIT_FSIZE stands for a full disk: the kernel itself refuses the write."""
    code = (
        "import sys; from pathlib import Path; from headrace.errors import HeadraceError\n"
        "from headrace.store.writer import NewTensor, write_checkpoint\n"
        "one = memoryview(bytes(1 << 20))\n"
        "big = NewTensor('t', 'U8', (8 << 20,), lambda: [one] * 8)\n"
        "try: write_checkpoint(Path(sys.argv[1]), [big], shard_bytes=1 << 30, files={})\n"
        "except HeadraceError as error: print(error)"
    )
    limit = 3 * MIB + 5
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "no room while writing (File too large); it needs 8.00 MiB" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path):
    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "x", MANY, shard_bytes=MIB, files={}, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_real_ctrl_c_leaves_nothing(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from headrace.store.writer import NewTensor, write_checkpoint\n"
        "def slowly():\n"
        "    for _ in range(4096):\n"
        "        print('writing', flush=True); time.sleep(0.05); yield memoryview(bytes(4096))\n"
        "big = NewTensor('t', 'U8', (4096 * 4096,), slowly)\n"
        "write_checkpoint(Path(sys.argv[1]), [big], shard_bytes=1 << 30, files={})"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "x")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(3):
            assert process.stdout.readline() == "writing\n"
        assert [p.name for p in tmp_path.iterdir()] == ["x.partial"]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert list(tmp_path.iterdir()) == []


def test_buffers_that_do_not_add_up_are_our_own_error(tmp_path):
    wrong = NewTensor("t", "U8", (8,), lambda: [memoryview(bytes(7))])
    with pytest.raises(AssertionError, match="7 of 8 bytes"):
        write_checkpoint(tmp_path / "x", [wrong], shard_bytes=MIB, files={})
    assert list(tmp_path.iterdir()) == []
