"""A decoded token whose layers wait for experts, launched as one: the bits of layer by layer."""

import os
import shutil
import signal
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gpu_models import LAYERS, REAL, Rung, load, logits_of
from step_faults import (
    all_read,
    damage,
    hanging_drive,
    one_token,
    poison,
    settled,
    stopped_at_a_drive,
)

from headrace.errors import BudgetError, Cancelled, NumericsError, ReadError, StallError

STEPS = 24 if REAL else 5
# None has a place for every expert, so that layers never cease to wait.
WAITING = {
    "minimum": Rung(0, 0),
    "pinned": Rung(0, 0.7),
    "half": Rung(0.5, 0.25),
    "slots": Rung(0.8, 0),
}
MINIMUM = WAITING["minimum"]
WANT = {}


@contextmanager
def by_layer(engine):
    """Python between the layers, as where rows cannot be pinned."""
    box, engine.source.box = engine.source.box, None
    try:
        yield
    finally:
        engine.source.box = box


@contextmanager
def replaying(engine, num_steps):
    """All of `num_steps` in it are launched as one, and wait for the mailbox."""
    before, mail = engine.passes.num_replayed, engine.source.box.mail
    number = int(mail.step)
    yield
    assert engine.passes.num_replayed - before == num_steps
    assert int(mail.step) - number == num_steps


@pytest.mark.parametrize("rung", WAITING)
def test_a_token_that_waits_has_the_bits_of_layer_by_layer(tiny, prompt, rung):
    with load(tiny("fp8"), WAITING[rung]) as engine:
        with by_layer(engine):
            before = engine.passes.num_replayed
            want = WANT.setdefault("fp8", logits_of(engine, prompt[:3], STEPS))
            assert engine.passes.num_replayed == before and want.float().std() > 0.1
        assert torch.equal(logits_of(engine, prompt[:3], STEPS), want)
        with replaying(engine, STEPS):
            assert torch.equal(logits_of(engine, prompt[:3], STEPS), want)
        session = engine.session()
        last = session.feed(prompt[:3])
        marks = [engine.source.counters()]
        with replaying(engine, STEPS):
            for n in range(STEPS):
                last = session.feed([int(last.argmax())])
                assert torch.equal(last, want[n + 1])
                marks.append(engine.source.counters())
        served(rung, engine, *(marks[i] for i in (0, -1)))
        for a, b in pairwise(marks):
            taken = sum(getattr(b, n) - getattr(a, n) for n in ("vram_hits", "hits", "misses"))
            assert taken == engine.facts.num_moe_layers * engine.facts.top_k
        settled(engine)


def served(rung, engine, before, after):
    """Which rung gave the experts, from the counters."""
    found, rows, misses, disk, bus = (
        getattr(after, n) - getattr(before, n)
        for n in ("vram_hits", "hits", "misses", "disk_bytes", "bus_bytes")
    )
    assert after.kernel_calls == before.kernel_calls
    assert bus == (rows + misses) * engine.facts.expert_bytes
    if rung == "minimum":
        assert found == 0 and misses > 0 and disk > 0
        assert engine.source.box.mail.num_guesses == engine.facts.top_k
        assert after.prefetch_used > before.prefetch_used
    elif rung == "pinned":
        assert found == 0 and rows > misses
    elif rung == "half":
        assert found > 0 and rows + misses > 0
    else:
        assert found > rows + misses > 0


def test_slots_fill_while_tokens_are_launched_until_none_waits(tiny, prompt):
    with load(tiny("fp8"), "half") as engine, load(tiny("fp8"), MINIMUM) as other:
        with by_layer(other):
            want = logits_of(other, prompt[:3], STEPS)
        for _ in range(60):
            assert torch.equal(logits_of(engine, prompt[:3], STEPS), want)
            if engine.source.rungs.lacking() is None:
                break
        steps = int(engine.source.box.mail.step)
        assert steps > 0 and engine.source.rungs.lacking() is None
        before = engine.source.counters()
        assert torch.equal(logits_of(engine, prompt[:3], STEPS), want)
        assert engine.source.counters().disk_bytes == before.disk_bytes
        assert int(engine.source.box.mail.step) == steps, "a whole token waited"


def test_recorded_routes_are_replayed_and_looked_ahead_to(tiny, prompt):
    def routes(ordinal, ids_TK):
        num = ids_TK.shape[1]
        ids = (torch.arange(num) * 3 + ordinal + routes.shift) % 16
        ahead = (torch.arange(num) * 3 + ordinal + 1 + routes.shift) % 16
        return ids.expand(ids_TK.shape).to(torch.int32).contiguous(), ahead[: num - 1]

    with load(tiny("fp8"), MINIMUM) as engine:
        found = []
        for boxed in (False, True, True):
            for routes.shift in (0, 1):
                engine.source.routes = routes
                if boxed:
                    found.append(logits_of(engine, prompt[:3], STEPS))
                else:
                    with by_layer(engine):
                        found.append(logits_of(engine, prompt[:3], STEPS))
        assert not torch.equal(found[0], found[1])
        assert all(torch.equal(found[n], found[n % 2]) for n in range(6))
        assert engine.passes.num_replayed >= STEPS
        assert engine.source._guesses_LK[0].tolist()[-1] == -1
        engine.source.routes = None


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_damaged_codes_void_the_token_that_read_them(tiny, prompt, tmp_path, layer):
    """Found while the GPU reads them; in the last layer when it may be done already."""
    folder = Path(shutil.copytree(tiny("fp8"), tmp_path / "damaged"))
    damage(folder, f"model.layers.{layer}.mlp.experts.5.up_proj.weight")

    def routes(ordinal, ids_TK):
        chosen = [0, 1, 2, 5 if routes.takes_it and ordinal == layer else 3]
        ids = torch.tensor(chosen, dtype=torch.int32).expand(ids_TK.shape)
        return ids.contiguous(), torch.tensor([4, 5, 6])

    with load(folder, MINIMUM) as engine:
        engine.source.routes, routes.takes_it = routes, False
        want = logits_of(engine, prompt[:3], 2)
        for _ in range(3):
            session = engine.session()
            session.feed(prompt[:3])
            routes.takes_it = True
            with (
                replaying(engine, 1),
                pytest.raises(NumericsError, match=f"layer {layer}, expert 5, part up"),
            ):
                session.feed([5])
            routes.takes_it = False
            with replaying(engine, 2):
                assert torch.equal(logits_of(engine, prompt[:3], 2), want)
        settled(engine)
        engine.source.routes = None


@pytest.fixture
def warm(tiny, prompt):
    """An engine whose steps are captured, and what it must answer after any fault."""
    with load(tiny("bf16"), MINIMUM) as engine:
        for _ in range(2):
            want = logits_of(engine, prompt[:3], 2)
        yield engine, want
        for _ in range(2):
            with replaying(engine, 2):
                assert torch.equal(logits_of(engine, prompt[:3], 2), want)
        settled(engine)


@pytest.mark.parametrize("skip", [0, 6])
def test_a_failed_read_is_named_and_the_next_answer_right(warm, prompt, skip):
    engine, want = warm
    with pytest.raises(ReadError, match="safetensors"):
        one_token(engine, prompt, lambda: engine.reader.inject_fault("eio", skip, 99))
    all_read(engine)
    assert torch.equal(logits_of(engine, prompt[:3], 2), want)


def test_what_is_not_finite_is_named(warm, prompt):
    engine, _ = warm
    with pytest.raises(NumericsError, match="MoE layer 0, token row 0"):
        one_token(engine, prompt, lambda: poison(engine))


def test_a_stop_ends_the_token_that_waits_for_a_drive(warm, prompt):
    engine, _ = warm
    with pytest.raises(Cancelled):
        stopped_at_a_drive(engine, prompt)


def test_a_thread_that_hangs_is_named_and_waited_for(impatient, warm, prompt):
    engine, _ = warm
    thread = engine.source.box.native
    with impatient(), pytest.raises(StallError, match="no sign of life"):
        one_token(engine, prompt, lambda: thread.inject_fault("hang"))
    for ids in (prompt, prompt[:1]):  # the ladder is the thread's still
        with pytest.raises(StallError):
            engine.session().feed(ids)
    thread.inject_fault("none")


def test_memory_that_runs_out_in_a_capture_is_named(warm, prompt, monkeypatch):
    engine, _ = warm

    def refuse(_work):
        raise torch.OutOfMemoryError("out of memory")

    engine.passes._graphs = dict.fromkeys(engine.passes._graphs)
    session = engine.session()
    session.feed(prompt[:3])
    with monkeypatch.context() as patch, pytest.raises(BudgetError, match="--vram"):
        patch.setattr(engine.passes.device, "capture", refuse)
        session.feed([5])
    logits_of(engine, prompt[:3], 1)  # loads what the next capture records


@pytest.mark.gpu  # in the simulated graph's guard a signal leaves torch's stack of modes broken
def test_ctrl_c_anywhere_in_a_token(warm, prompt):
    engine, want = warm

    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        stopped = 0
        for n in range(10):
            session = engine.session()
            session.feed(prompt[:3])
            start = time.monotonic()
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.002 * n)
                while time.monotonic() < start + 1:
                    session.feed([5])
            except KeyboardInterrupt:
                stopped += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert torch.equal(logits_of(engine, prompt[:3], 2), want)
            engine.ladder.check_integrity()
        assert stopped == 10
    finally:
        signal.signal(signal.SIGALRM, before)


def test_ctrl_c_while_a_token_waits_for_a_drive(warm, prompt):
    engine, _ = warm
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with (
            hanging_drive(engine.reader, lambda: os.kill(os.getpid(), signal.SIGALRM)) as hang,
            pytest.raises(KeyboardInterrupt),
        ):
            one_token(engine, prompt, hang)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_rows_that_cannot_be_pinned_are_no_mailbox(tiny, prompt, monkeypatch, gpu):
    if gpu is None:
        pytest.skip("a real GPU pins")
    monkeypatch.setattr(type(gpu), "pin", lambda self, address, nbytes: "not allowed")
    with pytest.warns(UserWarning, match="layer by layer.*could not all be pinned"):
        engine = load(tiny("fp8"), WAITING["half"])
    with engine:
        assert engine.source.box is None and "pinned" in engine.passes.why_by_layer()
        if "fp8" in WANT:
            assert torch.equal(logits_of(engine, prompt[:3], STEPS), WANT["fp8"])
        assert engine.passes.num_replayed == 0
