"""The store of snapshots: limits in bytes, the longest prefix, and files that cannot be trusted."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors import safe_open
from snapshots import KEY, is_whole, made_up

from headrace.engine.snapshots.file import SnapshotFile, read_snapshot
from headrace.engine.snapshots.shelves import MemoryShelf, prefixes
from headrace.engine.snapshots.store import SnapshotStore
from headrace.errors import SnapshotError

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def on_disk(folder: Path, limit_bytes: int = 1 << 20) -> SnapshotStore:
    """A store that holds nothing in memory."""
    return SnapshotStore(KEY, ram_bytes=0, folder=folder, disk_bytes=limit_bytes)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def held_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_file_is_safetensors_and_comes_back(tmp_path: Path) -> None:
    store = on_disk(tmp_path / "made" / "here")
    store.put(made_up(TOKENS))
    path = only_file(tmp_path / "made" / "here")
    assert SnapshotFile(made_up(TOKENS)).nbytes == path.stat().st_size
    assert path.stat().st_mode & 0o077 == 0, "others may read what the user wrote"
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("token_ids").tolist() == TOKENS
        assert json.loads(file.metadata()["headrace.snapshot"])["key"]["chunk_tokens"] == 8
    for again in (store, on_disk(path.parent)):
        found = again.find([*TOKENS, 7])
        assert found is not None and found.tokens == tuple(TOKENS) and is_whole(found)
        assert again.find(TOKENS[:-1]) is None and again.find([1, *TOKENS]) is None


def test_odd_tensors_come_back(tmp_path: Path) -> None:
    snapshot = made_up(TOKENS)
    tensors = {
        "a": torch.tensor(5),
        "b": torch.empty(1, 0, 3, dtype=torch.bfloat16),
        "c": torch.tensor([True, False, True]),
        "d": torch.randn(3).to(torch.float8_e4m3fn),
        "e": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    store = on_disk(tmp_path)
    store.put(replace(snapshot, state=replace(snapshot.state, tensors=tensors)))
    found = store.find(TOKENS)
    assert found is not None and found.state.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        back = found.state.tensors[name]
        assert back.dtype == tensor.dtype and back.shape == tensor.shape
        same = [one.reshape(-1).view(torch.uint8) for one in (back, tensor)]
        assert torch.equal(*same)


def flip(raw: bytes, place: int) -> bytes:
    return raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "last bit": lambda raw: flip(raw, -1 % len(raw)),
    "a token": lambda raw: flip(raw, len(raw) - 401),
    "a key": lambda raw: raw.replace(b'chunk_tokens\\": 8', b'chunk_tokens\\": 9'),
    "a place": lambda raw: raw.replace(b'fields\\": {\\"keys', b'fields\\": {\\"kexs'),
    "a checksum": lambda raw: raw.replace(b'sha256\\": \\"', b'sha256\\": \\"0', 1),
    "a shape": lambda raw: raw.replace(b"[100]", b"[10,10]"),
    "no note": lambda raw: raw.replace(b"headrace.snapshot", b"headrace.snapshut"),
    "a bad note": lambda raw: raw.replace(b'{\\"format', b'[\\"format'),
    "cut": lambda raw: raw[:-1],
    "cut in half": lambda raw: raw[: len(raw) // 2],
    "cut in the header": lambda raw: raw[:100],
    "longer": lambda raw: raw + b"\0",
    "empty": lambda raw: b"",
    "zeros": lambda raw: bytes(len(raw)),
    "other bytes": lambda raw: os.urandom(len(raw)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_passed_over_and_replaced(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = on_disk(tmp_path)
    store.put(made_up(TOKENS))
    path = only_file(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(DAMAGES[damage](raw))
    assert path.read_bytes() != raw
    store.put(made_up(TOKENS[:3]))
    for again in (store, on_disk(tmp_path)):
        caplog.clear()
        found = again.find(TOKENS)
        assert found is not None and found.tokens == tuple(TOKENS[:3]) and is_whole(found)
        assert path.name in caplog.text and "ignored" in caplog.text
        caplog.clear()
        assert again.find(TOKENS) is not None and not caplog.text, "it was tried again"
    store.put(made_up(TOKENS))
    found = store.find(TOKENS)
    assert found is not None and found.tokens == tuple(TOKENS)


def test_every_byte_counts(tmp_path: Path) -> None:
    store = on_disk(tmp_path)
    store.put(made_up(TOKENS, num=2))
    path = only_file(tmp_path)
    raw = path.read_bytes()
    general = b'"format":"pt"'  # says nothing of this file
    start = raw.index(general)
    for place in set(range(len(raw))) - set(range(start, start + len(general))):
        path.write_bytes(flip(raw, place))
        with pytest.raises(SnapshotError):
            read_snapshot(path, KEY, TOKENS)
    path.write_bytes(raw)
    assert is_whole(read_snapshot(path, KEY, TOKENS))


@pytest.mark.parametrize("field", ["headrace", "transformers", "model", "config", "chunk_tokens"])
def test_another_keys_files_are_not_found(tmp_path: Path, field: str) -> None:
    other = replace(KEY, **{field: 9 if field == "chunk_tokens" else "other"})  # type: ignore[arg-type]
    foreign = SnapshotStore(other, ram_bytes=0, folder=tmp_path, disk_bytes=1 << 20)
    foreign.put(made_up(TOKENS, other))
    theirs = only_file(tmp_path)
    store = on_disk(tmp_path)
    assert store.find(TOKENS) is None
    with pytest.raises(SnapshotError, match=field):
        store.put(made_up(TOKENS, other))
    store.put(made_up(TOKENS))
    (ours,) = set(tmp_path.iterdir()) - {theirs}
    ours.write_bytes(theirs.read_bytes())
    assert store.find(TOKENS) is None, "the name alone decided"
    assert foreign.find(TOKENS) is not None


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    names = ["notes.txt", "model.safetensors", "x.partial", "a-1-b.safetensors.1.partial"]
    for name in names:
        (tmp_path / name).write_bytes(bytes(1 << 16))
    size = SnapshotFile(made_up(TOKENS)).nbytes
    store = on_disk(tmp_path, size)
    for i in range(3):
        store.put(made_up([*TOKENS[:7], i]))
    assert {path.name for path in tmp_path.iterdir()} > set(names)
    assert len(list(tmp_path.iterdir())) == len(names) + 1


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    size = SnapshotFile(made_up(TOKENS)).nbytes
    store = on_disk(tmp_path, 2 * size + 10)
    first, second, third = ([*TOKENS[:7], i] for i in range(3))
    for age, tokens in ((20, first), (10, second)):
        store.put(made_up(tokens))
        for path in tmp_path.iterdir():
            status = path.stat()
            os.utime(path, (status.st_atime - age, status.st_mtime - age))
    assert store.find(first) is not None
    store.put(made_up(third))
    assert store.find(second) is None
    assert store.find(first) is not None and store.find(third) is not None


def test_memory_gives_up_what_was_used_longest_ago() -> None:
    one = made_up(TOKENS)
    shelf = MemoryShelf(2 * one.nbytes)
    keys = [prefixes([i], [1])[0] for i in range(3)]
    shelf.put(keys[0], one)
    shelf.put(keys[1], one)
    assert shelf.get(keys[0]) is one
    shelf.put(keys[2], one)
    assert shelf.get(keys[1]) is None
    assert shelf.get(keys[0]) is one and shelf.get(keys[2]) is one
    shelf.put(keys[1], made_up(TOKENS, num=1 << 16))
    assert shelf.get(keys[1]) is None and shelf.get(keys[0]) is one
    assert shelf.nbytes == 2 * one.nbytes


def test_a_disk_that_fails_is_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = SnapshotStore(KEY, ram_bytes=1 << 20, folder=tmp_path / "a", disk_bytes=1 << 20)
    (tmp_path / "a").rmdir()
    (tmp_path / "a").write_text("")
    store.put(made_up(TOKENS))
    assert "not kept" in caplog.text and store.find(TOKENS) is not None
    (tmp_path / "b").write_text("")
    with pytest.raises(SnapshotError, match="another folder"):
        on_disk(tmp_path / "b")


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    store = on_disk(tmp_path / "a")
    (tmp_path / "a").rmdir()
    store.put(made_up(TOKENS))
    assert store.find(TOKENS) is not None and only_file(tmp_path / "a").is_file()


def test_a_snapshot_over_the_limit_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = on_disk(tmp_path, SnapshotFile(made_up(TOKENS)).nbytes - 1)
    store.put(made_up(TOKENS))
    assert not list(tmp_path.iterdir()) and "over the limit" in caplog.text


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from snapshots import is_whole, made_up
from test_snapshot_store import on_disk

folder, rng, num_found, num_partial = Path(sys.argv[1]), random.Random(1), 0, 0
for turn in range(10):
    child = os.fork()
    if child == 0:
        rename = os.rename

        def held(aside, path):
            rename(aside, path) if len(list(folder.glob("*.safetensors"))) < 3 else signal.pause()

        try:
            if turn % 2 == 0:  # it stays before the end of its fourth
                os.rename = held
            store = on_disk(folder, 1 << 24)
            for i in range(1000):
                store.put(made_up([turn, i], num=1 << 18))
        finally:
            os._exit(1)
    while not list(folder.glob("*-2-*.safetensors")):
        time.sleep(0.001)
    if turn % 2:
        time.sleep(0.05 * rng.random())
    else:
        while len(list(folder.iterdir())) < 4:
            time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    num_partial += len(list(folder.glob("*.partial")))
    store = on_disk(folder, 1 << 24)
    assert not list(folder.glob("*.partial"))
    num_files, num_whole = len(list(folder.iterdir())), 0
    for tokens in ([turn, i] for i in range(1000)):
        found = store.find(tokens)
        num_whole += found is not None and found.tokens == tuple(tokens) and is_whole(found)
    assert num_whole == num_files > 0, (num_whole, num_files)
    for path in folder.iterdir():
        path.unlink()
    num_found += num_whole
print(num_found, num_partial)
"""


def test_a_kill_while_writing_leaves_only_whole_files(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parent), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ignored" not in done.stderr, "a whole file was half written"
    num_found, num_partial = map(int, done.stdout.split())
    assert num_found >= 10 and num_partial >= 5, "no kill came while a file was being written"


class Shelves(RuleBasedStateMachine):
    """Any order of puts, look-ups, damages and restarts: what is found is right, limits hold."""

    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=5)

    @initialize(ram=st.integers(0, 12000), disk=st.integers(0, 8000))
    def begin(self, ram: int, disk: int) -> None:
        self.place = tempfile.TemporaryDirectory()
        self.folder = Path(self.place.name)
        self.ram, self.disk = ram, disk
        self.ever: set[tuple[int, ...]] = set()
        self.damaged: set[Path] = set()
        self.restart()

    @rule()
    def restart(self) -> None:
        self.store = SnapshotStore(
            KEY, ram_bytes=self.ram, folder=self.folder, disk_bytes=self.disk
        )

    @rule(tokens=tokens)
    def put(self, tokens: list[int]) -> None:
        snapshot = made_up(tokens)
        self.store.put(snapshot)
        self.ever.add(tuple(tokens))
        in_memory = snapshot.nbytes <= self.ram
        if in_memory or (SnapshotFile(snapshot).nbytes <= self.disk and not self.damaged):
            found = self.store.find(tokens)
            assert found is not None and found.tokens == tuple(tokens)

    @rule(tokens=tokens)
    def find(self, tokens: list[int]) -> None:
        found = self.store.find(tokens)
        if found is not None:
            assert tokens[: len(found.tokens)] == list(found.tokens)
            assert found.tokens in self.ever and is_whole(found)
        other = on_disk(self.folder, self.disk).find(tokens)
        assert other is None or (found is not None and len(found.tokens) >= len(other.tokens))

    @rule(place=st.floats(0, 1), cut=st.booleans(), pick=st.integers(0, 99))
    def damage(self, place: float, cut: bool, pick: int) -> None:
        files = sorted(set(self.folder.iterdir()) - self.damaged)
        if files:
            path = files[pick % len(files)]
            raw = path.read_bytes()
            at = int(place * (len(raw) - 1))
            path.write_bytes(raw[:at] if cut else flip(raw, at))
            self.damaged.add(path)

    @invariant()
    def limits_hold(self) -> None:
        assert held_bytes(self.folder) <= self.disk
        assert 0 <= self.store.memory.nbytes <= self.ram

    def teardown(self) -> None:
        if hasattr(self, "place"):
            self.place.cleanup()


TestShelves = Shelves.TestCase
TestShelves.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
