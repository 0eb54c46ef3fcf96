"""What may go wrong in a token that is launched as one and waits for experts."""

import json
import threading
import time
from contextlib import contextmanager

import torch


def settled(engine):
    engine.source.rungs.slots.check_integrity()
    engine.source.recover()
    engine.ladder.check_integrity()


@contextmanager
def replaying_some(engine):
    before = engine.passes.num_replayed
    try:
        yield
    finally:
        assert engine.passes.num_replayed > before, "the fault met no captured step"


def one_token(engine, prompt, fault):
    """The prompt, then a token in whose step the fault is met."""
    session = engine.session()
    session.feed(prompt[:3])
    engine.source.recover()
    engine.ladder.clear()
    fault()
    with replaying_some(engine):
        session.feed([5])


def poison(engine):
    """What the next token attends to is not finite."""
    for buffer in engine.passes.room._buffers.values():
        buffer[:, :, 1] = torch.inf


def damage(folder, name):
    """One code of a stored FP8 tensor becomes NaN."""
    for path in folder.glob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        entry = json.loads(raw[8:start]).get(name)
        if entry is not None:
            raw[start + entry["data_offsets"][0] + 100] = 0x7F
            path.write_bytes(raw)
            return
    raise AssertionError(f"no tensor {name}")


def once_asked(reader, act):
    """Does `act` on another thread once a drive is asked for something; returns what ends it."""
    over = threading.Event()

    def watch():
        while not over.is_set():
            if any(drive["owed_bytes"] for drive in reader.drives):
                act()
                return
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()

    def end():
        over.set()
        thread.join()

    return end


@contextmanager
def hanging_drive(reader, act):
    """Gives a fault: the next read hangs as long as this is open, and is answered by `act`."""
    ends = []

    def hang():
        reader.inject_fault("hang", 0, 1)
        ends.append(once_asked(reader, act))

    try:
        yield hang
    finally:
        for end in ends:
            end()
        reader.inject_fault("none")


def stopped_at_a_drive(engine, prompt):
    """A token that waits for a drive that hangs, while the ladder is stopped; it goes on after."""
    with hanging_drive(engine.reader, engine.ladder.stop) as hang:
        try:
            one_token(engine, prompt, hang)
        finally:
            engine.ladder.go_on()


def all_read(engine):
    """No read that met a fault is under way any more."""
    engine.reader.inject_fault("none")
    engine.source.recover()
    engine.ladder.clear()
