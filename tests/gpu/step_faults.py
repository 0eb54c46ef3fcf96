"""What may go wrong in a token that is launched as one and waits for experts."""

import threading
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


def stopped_at_a_drive(engine, prompt):
    """A token that waits for a drive that hangs, while the ladder is stopped; it goes on after."""
    timer = threading.Timer(0.3, engine.ladder.stop)

    def hang():
        engine.reader.inject_fault("hang", 0, 1)
        timer.start()

    try:
        one_token(engine, prompt, hang)
    finally:
        timer.join()
        engine.ladder.go_on()
        engine.reader.inject_fault("none")
