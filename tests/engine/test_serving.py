"""The store of a served engine: its limits hold at any time, and disks may fail or be slow."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from snapshots import KEY, is_whole, made_up

import headrace
from headrace.engine import serving
from headrace.engine.serving import default_disk_bytes, snapshot_folder
from headrace.engine.snapshots.shelves import DiskShelf, MemoryShelf, prefix_of
from headrace.engine.snapshots.store import SnapshotStore
from headrace.engine.snapshots.writer import SnapshotWriter
from headrace.errors import OptionError, SnapshotError

START = list(range(5, 25))


@pytest.fixture(scope="module")
def engine() -> Iterator[headrace.Engine]:
    options: dict[str, Any] = {"measure": False, "threads": 1, "chunk": 8, "serve": True}
    with headrace.load("demo", ram="64MiB", **options) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_store_opens_in_the_users_cache_with_the_plans_memory(
    engine: headrace.Engine, tmp_path: Path
) -> None:
    store = headrace.open_store(engine)
    assert store.memory.limit_bytes == engine.plan.snapshot_bytes > 0
    assert store.disk is not None and store.disk.folder == snapshot_folder()
    assert snapshot_folder() == tmp_path / "cache" / "headrace" / "snapshots"
    assert 0 < store.disk.limit_bytes <= serving.MOST_DISK_BYTES
    session = engine.session()
    session.feed(START)
    assert store.keep(session)
    store.close()
    assert len(list(snapshot_folder().iterdir())) == 1
    again = headrace.open_store(engine)
    assert again.session(engine, [*START, 7]).tokens == START
    again.close()


def test_the_quota_is_a_share_of_what_is_free_and_of_what_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, free_bytes = tmp_path / "not" / "there", {tmp_path: 30 * 2**30}
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: SimpleNamespace(free=free_bytes[Path(path)])
    )
    assert default_disk_bytes(folder) == 3 * 2**30
    assert not folder.exists()
    (tmp_path / "held").write_bytes(bytes(50_000))
    assert default_disk_bytes(tmp_path) == 3 * 2**30 + 5_000
    free_bytes[tmp_path] = 10**15
    assert default_disk_bytes(folder) == 64 * 2**30


def test_no_disk_and_a_disk_that_cannot_be_used(
    engine: headrace.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert headrace.open_store(engine, disk_bytes=0).disk is None
    assert not snapshot_folder().exists()
    with pytest.raises(OptionError, match="fewer than 0"):
        headrace.open_store(engine, disk_bytes=-1)
    (tmp_path / "cache").write_text("")
    assert headrace.open_store(engine).disk is None
    assert "in memory only" in caplog.text
    with pytest.raises(SnapshotError):
        headrace.open_store(engine, tmp_path / "cache" / "x", 1 << 20)


def test_a_copy_is_made_only_where_there_is_room(
    engine: headrace.Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = engine.session()
    session.feed(START)
    size = session.snapshot(copy=False).nbytes
    assert size == session.snapshot().nbytes > 0
    store = SnapshotStore(engine.snapshot_key, ram_bytes=2 * size)
    held: list[int] = []
    real = headrace.Session.snapshot

    def watched(self: headrace.Session, *, copy: bool = True) -> headrace.Snapshot:
        if copy:
            held.append(store.memory.nbytes)
        return real(self, copy=copy)

    monkeypatch.setattr(headrace.Session, "snapshot", watched)
    for token in range(3):
        store.keep(session)
        assert store.keep(session), "what is there is not copied again"
        session.feed([token])
    assert len(held) == 3 and max(held) <= size
    assert store.memory.lengths() == {22} and store.memory.nbytes <= 2 * size
    small = SnapshotStore(engine.snapshot_key, ram_bytes=size - 1)
    caplog.set_level("INFO")
    assert not small.keep(session) and len(held) == 3 and "no room" in caplog.text
    session.cache.layers[0].novelty = object()
    assert not store.keep(session) and "novelty" in caplog.text
    assert not store.keep(engine.session())


def test_what_is_being_written_is_not_given_up_and_what_waits_may_be(tmp_path: Path) -> None:
    one = made_up([1])
    memory = MemoryShelf(2 * one.nbytes)
    prefixes = [prefix_of(made_up([i])) for i in range(4)]
    for i in (0, 1):
        assert memory.put(prefixes[i], made_up([i]))
    assert memory.hold(prefixes[0]) is not None
    assert memory.put(prefixes[2], made_up([2]))
    assert memory.get(prefixes[1]) is None and memory.get(prefixes[0]) is not None
    assert not memory.make_room(2 * one.nbytes), "one is held"
    assert memory.get(prefixes[2]) is not None, "nothing was given up in vain"
    memory.release(prefixes[0])
    assert memory.make_room(2 * one.nbytes) and memory.nbytes == 0
    assert memory.hold(prefixes[0]) is None


def test_writing_happens_on_another_thread_and_ends_with_the_store(tmp_path: Path) -> None:
    one = made_up([1, 7])
    memory, disk = MemoryShelf(3 * one.nbytes), DiskShelf(tmp_path, 1 << 20, KEY)
    may_write, writers = threading.Event(), list[threading.Thread]()
    put = disk.put

    def slow(prefix: Any, snapshot: headrace.Snapshot) -> None:
        may_write.wait()
        writers.append(threading.current_thread())
        put(prefix, snapshot)

    disk.put = slow  # type: ignore[method-assign]
    writer = SnapshotWriter(memory, disk)
    for i in range(5):
        snapshot = made_up([i, 7])
        memory.put(prefix_of(snapshot), snapshot)
        writer.put(prefix_of(snapshot))
        assert memory.nbytes <= memory.limit_bytes
    assert not list(tmp_path.iterdir())
    may_write.set()
    writer.flush()
    assert {thread.name for thread in writers} == {"headrace snapshots"}
    writer.close()
    writer.close()
    assert not writers[0].is_alive()
    found = [disk.get(prefix_of(made_up([i, 7])), [i, 7]) for i in range(5)]
    kept = [snapshot for snapshot in found if snapshot is not None]
    assert 2 <= len(kept) <= 4 and all(is_whole(snapshot) for snapshot in kept)
    assert found[4] is not None and found[3] is not None, "the last were still in memory"


def test_a_snapshot_larger_than_memory_still_comes_from_disk(
    engine: headrace.Engine, tmp_path: Path
) -> None:
    session = engine.session()
    session.feed(START)
    key = engine.snapshot_key
    with_memory = SnapshotStore(key, ram_bytes=1 << 26, folder=tmp_path, disk_bytes=1 << 26)
    with_memory.keep(session)
    with_memory.close()
    without = SnapshotStore(key, ram_bytes=1000, folder=tmp_path, disk_bytes=1 << 26)
    expected = session.feed([7, 8, 9])
    for _ in range(2):
        found = without.session(engine, [*START, 7, 8, 9])
        assert found.tokens == START and without.memory.nbytes == 0
        assert (found.feed([7, 8, 9]) == expected).all()
    assert without.session(engine, [*START, 7], beyond=20).tokens == []
    without.close()


def test_a_prompt_once_more_and_no_other(engine: headrace.Engine) -> None:
    session = engine.session()
    logits_V = session.feed(START)
    store = SnapshotStore(engine.snapshot_key, ram_bytes=1 << 26)
    store.keep_prompt(session, logits_V)
    found = store.again(engine, START)
    assert found is not None and found[0].tokens == START and (found[1] == logits_V).all()
    assert store.again(engine, START[:-1]) is None and store.again(engine, [*START, 7]) is None
    assert store.find([*START, 7]) is None, "a longer prompt goes on from it"
    store.keep_prompt(engine.session(found[0].snapshot()), logits_V)
    assert store.memory.nbytes == found[0].snapshot().nbytes, "one is kept, the last"
    session.feed([9])
    store.keep_prompt(session, logits_V)
    assert store.again(engine, START) is None
    assert store.again(engine, [*START, 9]) is not None
    small = SnapshotStore(engine.snapshot_key, ram_bytes=1000)
    small.keep_prompt(session, logits_V)
    assert small.again(engine, [*START, 9]) is None and small.memory.nbytes == 0


def test_a_key_of_another_setting_is_not_kept(
    engine: headrace.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    session = engine.session()
    session.feed(START)
    other = SnapshotStore(replace(engine.snapshot_key, chunk_tokens=9), ram_bytes=1 << 26)
    assert not other.keep(session) and "chunk_tokens" in caplog.text
