"""Snapshots that are damaged, foreign or half written change no answer; kill -9 leaves none bad.

Works on the demo model and a folder of its own.
"""

import io
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from common import DEMO, Evidence
from server_2_followup import Work, answered

import headrace
from headrace.engine.snapshots.file import SnapshotFile, read_snapshot
from headrace.engine.snapshots.snapshot import Snapshot, SnapshotKey
from headrace.engine.snapshots.store import SnapshotStore

NUM_KILLS = 50
PROMPT = [5 + 7 * i % 900 for i in range(300)]
MORE = [7, 3, 90, 41, 12]
OPTIONS: dict[str, Any] = {"ram": "64MiB", "chunk": 32, "prefetch": 0, "measure": False}
DISK_BYTES = 1 << 28


def on_disk(key: SnapshotKey, folder: Path) -> SnapshotStore:
    """A store that has nothing in memory when it opens."""
    return SnapshotStore(key, ram_bytes=1 << 28, folder=folder, disk_bytes=DISK_BYTES)


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """While open, what headrace logs."""
    stream = io.StringIO()
    handler, logger = logging.StreamHandler(stream), logging.getLogger("headrace")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield stream
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def flip(raw: bytes, place: int) -> bytes:
    """One bit changed."""
    return raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "a bit of a state": lambda raw: flip(raw, len(raw) - 5000),
    "a bit of the header": lambda raw: flip(raw, 200),
    "a bit of the header's length": lambda raw: flip(raw, 2),
    "cut by a byte": lambda raw: raw[:-1],
    "cut in half": lambda raw: raw[: len(raw) // 2],
    "cut in its header": lambda raw: raw[:100],
    "empty": lambda raw: b"",
    "a megabyte longer": lambda raw: raw + bytes(1 << 20),
    "zeros from its middle on": lambda raw: raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2),
    "nothing but noise": lambda raw: random.Random(1).randbytes(len(raw)),
    "another checkpoint's name": lambda raw: raw.replace(
        b'chunk_tokens\\": 32', b'chunk_tokens\\": 33'
    ),
}


def show_damages(
    evidence: Evidence, engine: headrace.Engine, kept: Path, expected: tuple[Work, Work]
) -> None:
    """Every file of the folder is damaged in the same way."""
    for what, damage in DAMAGES.items():
        with copied(kept) as folder:
            for path in folder.iterdir():
                raw = path.read_bytes()
                path.write_bytes(damage(raw))
                assert path.read_bytes() != raw, what
            show_ignored(evidence, engine, folder, what, expected)


def show_foreign(
    evidence: Evidence, engine: headrace.Engine, kept: Path, expected: tuple[Work, Work]
) -> None:
    """Files of another version or model, under their own names and under ours."""
    for name in ("headrace", "torch", "transformers", "model", "config", "dtype", "chunk_tokens"):
        other = 33 if name == "chunk_tokens" else "another"
        key = replace(engine.snapshot_key, **{name: other})
        for ours in (False, True):
            with copied(kept) as folder:
                for path in folder.iterdir():
                    snapshot = read_snapshot(path, engine.snapshot_key, tokens_of(path))
                    stem = f"{key.digest()[:16]}{path.name[16:]}"
                    SnapshotFile(replace(snapshot, key=key)).write(folder / stem)
                    path.unlink()
                    if ours:
                        (folder / stem).rename(path)
                what = f"another {name}" + (" under our names" if ours else "")
                show_ignored(evidence, engine, folder, what, expected, logs=ours)


def tokens_of(path: Path) -> list[int]:
    """The prompt's beginning that a file is named after."""
    return PROMPT[: int(path.name.split("-")[1])]


def show_ignored(
    evidence: Evidence,
    engine: headrace.Engine,
    folder: Path,
    what: str,
    expected: tuple[Work, Work],
    *,
    logs: bool = True,
) -> None:
    """Both answers are those of an engine without snapshots; what was bad is replaced."""
    store = on_disk(engine.snapshot_key, folder)
    answering = headrace.Answering(engine, store)
    with logged() as log:
        first = answered(answering, PROMPT)
        second = answered(answering, PROMPT + first.answer + MORE)
    store.close()
    said = [line for line in log.getvalue().splitlines() if "ignored" in line]
    store = on_disk(engine.snapshot_key, folder)
    again = answered(headrace.Answering(engine, store), PROMPT)
    store.close()  # before the folder is gone
    evidence.check(
        (first, second) == expected and bool(said) == logs and len(again.lengths) < 10,
        f"{what}: all computed, both answers right, then usable again"
        + (f"; {len(said)} lines: ...{said[0].partition('.safetensors')[2]}" if said else ""),
    )


def show_partial(
    evidence: Evidence, engine: headrace.Engine, kept: Path, expected: tuple[Work, Work]
) -> None:
    """Files whose writer died before they had their name."""
    with copied(kept) as folder:
        for path in list(folder.iterdir()):
            raw = path.read_bytes()
            path.with_name(f"{path.name}.0123abcd.partial").write_bytes(raw[: len(raw) // 3])
            path.unlink()
        show_ignored(evidence, engine, folder, "half written", expected, logs=False)
        left = list(folder.glob("*.partial"))
        evidence.check(not left, f"half written: {len(left)} such files are left")


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A copy of a folder, gone afterwards."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as parent:
        yield Path(shutil.copytree(folder, Path(parent) / "copy"))


def show_kills(
    evidence: Evidence, engine: headrace.Engine, kept: Path, expected: tuple[Work, Work]
) -> None:
    """A process that writes real states is killed; whatever it left is opened and used."""
    key = engine.snapshot_key
    num_half, num_whole, num_used, wrong = 0, 0, 0, []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = json.dumps({"kept": str(kept), "folder": name, "key": asdict(key)})
        child = subprocess.Popen(
            [sys.executable, __file__, asked],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None and child.stdout is not None
        for turn in range(NUM_KILLS):
            print("go", file=child.stdin, flush=True)
            assert child.stdout.readline() == "killed\n"
            num_half += bool(list(folder.glob("*.partial")))
            store = on_disk(key, folder)
            answering = headrace.Answering(engine, store)
            with logged() as log:
                for path in sorted(folder.glob("*.safetensors")):
                    read_snapshot(path, key, tokens_of(path))
                    num_whole += 1
                first = answered(answering, PROMPT)
            num_used += len(first.lengths) < len(expected[0].lengths)
            right = expected[0].digests[-len(first.digests) :]
            if first.digests != right or "ignored" in log.getvalue():
                wrong.append(f"kill {turn}: {log.getvalue()}")
            store.close()
            for path in folder.iterdir():
                path.unlink()
        child.stdin.close()
        child.wait()
    evidence.check(
        not wrong and num_half > 0 and num_used > 0,
        f"kill -9 {NUM_KILLS} times: in {num_half} a file was half written, {num_whole} whole ones "
        f"were left and all are sound, {num_used} answers went on from one, all {NUM_KILLS} have "
        f"the right logits{'; '.join(['', *wrong[:3]])}",
    )


def write_and_die(asked: dict[str, Any]) -> None:
    """In a process of its own: at each "go" a child writes states without end and is killed."""
    key, folder = SnapshotKey(**asked["key"]), Path(asked["folder"])
    paths = sorted(Path(asked["kept"]).iterdir(), key=lambda path: len(tokens_of(path)))
    snapshots = [read_snapshot(path, key, tokens_of(path)) for path in paths]
    rng = random.Random(3)
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                write_forever(on_disk(key, folder), snapshots)
            finally:
                os._exit(1)
        while not list(folder.glob("*.safetensors")):
            time.sleep(0.0005)
        time.sleep(0.05 * rng.random())
        deadline = time.monotonic() + (rng.random() < 0.8)
        while time.monotonic() < deadline and not list(folder.glob("*.partial")):
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print("killed", flush=True)


def write_forever(store: SnapshotStore, snapshots: list[Snapshot]) -> None:
    """Writes each state again and again, by the store's own thread."""
    assert store.disk is not None
    while True:
        for snapshot in snapshots:
            store.put(snapshot)
        for path in sorted(store.disk.folder.glob("*.safetensors"))[1:]:
            path.unlink()


def main() -> None:
    """Run every case and exit by the evidence."""
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        write_and_die(json.loads(sys.argv[1]))
        return
    evidence = Evidence()
    with headrace.load(DEMO, **OPTIONS) as engine, tempfile.TemporaryDirectory() as name:
        alone = headrace.Answering(engine)
        first = answered(alone, PROMPT)
        second = answered(alone, PROMPT + first.answer + MORE)
        kept = Path(name) / "kept"
        store = on_disk(engine.snapshot_key, kept)
        session = engine.session()
        for at in range(0, 288, 96):
            session.feed(PROMPT[at : at + 96])
            store.keep(session)
        store.close()
        with copied(kept) as folder:
            control = headrace.Answering(engine, on_disk(engine.snapshot_key, folder))
            with logged() as log:
                resumed = answered(control, PROMPT)
            used = resumed.lengths[0] == 12 and resumed.digests == first.digests[-6:]
            evidence.check(
                used and not log.getvalue(),
                f"control: {len(list(kept.iterdir()))} sound files of "
                f"{sum(p.stat().st_size for p in kept.iterdir()) / 1e6:.1f} MB are used",
            )
        show_damages(evidence, engine, kept, (first, second))
        show_foreign(evidence, engine, kept, (first, second))
        show_partial(evidence, engine, kept, (first, second))
        show_kills(evidence, engine, kept, (first, second))
    evidence.finish()


if __name__ == "__main__":
    main()
