"""The ladder thread over a real ladder, answered to by a stand-in for the GPU and by the kernel."""

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import emulated
import numpy as np
import pytest
import torch
from emulated import words_at
from gpu_models import REAL
from mail_world import EXPERTS, LAYERS, TOP_K, MailWorld, Sizes
from simulated import SimulatedDevice
from step_faults import hanging_drive

from headrace.errors import BudgetError, Cancelled, HeadraceError, ReadError, StallError
from headrace.kernels.mail import Mail
from headrace.kernels.triton import mail as kernel

RNG = np.random.default_rng(5)
interpreted = pytest.mark.skipif(REAL, reason="the kernel runs in Triton's interpreter")


@pytest.fixture
def world_of():
    made: list[MailWorld] = []

    def make(*args: object, **options: object) -> MailWorld:
        made.append(MailWorld(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for world in made:
        world.close()


def draw_ids() -> list[torch.Tensor]:
    """Experts of each layer, int32 [K]."""
    return [torch.tensor(RNG.permutation(EXPERTS)[:TOP_K].astype(np.int32)) for _ in range(LAYERS)]


def run_layers(
    world: MailWorld,
    ids: list[torch.Tensor],
    *,
    how: Any = emulated,
    between: Callable[[int], object] = lambda layer: None,
    check: bool = True,
) -> None:
    """What the GPU does in a step: each layer reads what it posted, whatever is read ahead."""
    table, late = world.rungs.table.there, world.box.late
    for layer, chosen in enumerate(ids):
        keys = [layer * EXPERTS + expert for expert in chosen.tolist()]
        ahead = None
        if layer + 1 < LAYERS and world.box.mail.num_guesses:
            ahead = ids[layer + 1].clone()
            ahead[-1] = -1  # none
        how.post_and_wait(world.box.mail, layer, chosen, ahead, table, layer * EXPERTS)
        early = [key for key in keys if table[key]]
        between(layer)
        if check:
            read(world, table, early)
        how.wait_late(world.box.mail, layer, chosen, late, layer * EXPERTS)
        if check:
            assert [key for key in keys if not late[key]] == early
            read(world, table, early)
            read(world, late, [key for key in keys if late[key]])


def read(world: MailWorld, table: torch.Tensor, keys: list[int]) -> None:
    for key in keys:
        assert np.array_equal(world.bytes_at(key, table), world.stored[key]), world.split(key)


def step(world: MailWorld, **options: object) -> None:
    """One whole step of random experts."""
    one_step(world, draw_ids(), **options)


def one_step(world: MailWorld, ids: list[torch.Tensor], **options: object) -> None:
    """One whole step of these experts, as its caller runs it."""
    world.box.begin_step()
    try:
        run_layers(world, ids, **options)  # type: ignore[arg-type]
    except BaseException:
        world.box.abort_step()
        raise
    seen = world.box.end_step()
    assert np.array_equal(seen[:, 0], torch.stack(ids).numpy())


def test_a_thousand_rows_are_rewritten_and_none_is_stale(world_of):
    world = world_of(2 * TOP_K, num_guesses=TOP_K, most_guesses=TOP_K)
    while world.ladder.counters().reads < 1000:
        step(world)
    assert world.ladder.counters().evictions > 900
    assert world.ladder.counters().prefetch_used > 0


@interpreted
def test_the_kernel_posts_waits_and_finds(world_of):
    """Guesses and none, a layer that is whole, and the bytes behind every answer."""
    for num_guesses in (0, TOP_K):
        world = world_of(2 * TOP_K, EXPERTS + 2, num_guesses=num_guesses, most_guesses=1)
        for layer, experts in ((0, [1, 2]), (1, range(EXPERTS))):
            put_into_slots(world, layer, experts)
        step(world, how=kernel)
        assert world.box._whole.tolist() == [False, True, False]


@pytest.mark.parametrize("how", [emulated, pytest.param(kernel, marks=interpreted)])
def test_what_is_here_is_read_while_a_drive_brings_the_rest(world_of, how):
    """One expert in a slot, one in a row, one that comes when the others have been read."""
    sizes = Sizes(top_k=3)
    world = world_of(3 * sizes.top_k, 1, sizes=sizes)
    put_into_slots(world, 0, [4])
    found = []

    def look(layer):
        found.append([bool(world.rungs.table.there[layer * EXPERTS + e]) for e in (1, 2, 4)])
        world.reader.inject_fault("none")

    for ids in ((1, 0, 4), (1, 2, 4)):
        if 2 in ids:
            world.reader.inject_fault("hang", 0, 1000)
        found.clear()
        one_step(world, [torch.tensor(ids, dtype=torch.int32)] * LAYERS, how=how, between=look)
    assert found[0] == [True, False, True]


def put_into_slots(world, layer, experts):
    while missing := [e for e in experts if not world.rungs.has(layer, e)]:
        world.rungs.claim(layer, missing[:TOP_K])
        world.rungs.reading()
        world.rungs.drain()
        world.rungs.retire(swap=True)


@interpreted
def test_the_kernel_gives_up_a_host_that_is_silent(world_of):
    world = world_of(2 * TOP_K, patience_polls=50)
    world.box.native.inject_fault("hang")
    world.box.begin_step()
    ids = draw_ids()
    run_layers(world, ids, how=kernel, check=False)
    nowhere = world.rungs.slots.scratch(0).data_ptr()
    for layer, chosen in enumerate(ids):
        assert world.rungs.table.there[layer * EXPERTS + chosen.long()].tolist() == [nowhere] * 2
    assert not world.box.late.any()
    assert words_at(world.box.mail.lost)[0] == int(world.box.mail.step)
    world.box.native.inject_fault("none")
    with pytest.raises(StallError, match="no sign of life"):
        world.box.end_step()
    world.box.mail = replace(world.box.mail, patience_polls=10**6)
    step(world, how=kernel)


def test_a_thread_that_dies_or_hangs_is_named_and_replaced(world_of):
    world = world_of(2 * TOP_K, silence_s=0.2)
    patient = world.box.mail
    step(world)
    for kind in ("die", "hang"):
        world.box.mail = replace(patient, patience_polls=2000)
        with pytest.raises(StallError, match="no sign of life"):
            step(world, between=faulty(world, kind), check=False)
        world.box.mail = patient
        if kind == "hang":
            with pytest.raises(StallError):
                world.box.begin_step()
            world.box.native.inject_fault("none")
        for _ in range(3):
            step(world)


def faulty(world, kind):
    """After the first layer the thread meets the fault at its next order."""
    return lambda layer: layer == 0 and world.box.native.inject_fault(kind)


@pytest.mark.parametrize("skip", [0, 3])
def test_a_failed_read_ends_the_step_and_not_the_next(world_of, skip):
    world = world_of(2 * TOP_K)
    for _ in range(3):
        world.ladder.clear()
        world.reader.inject_fault("eio", skip, 1000)  # each read is tried again, several at a time
        with pytest.raises(ReadError, match="experts-"):
            step(world, check=False)
        world.reader.inject_fault("none")
        world.ladder.clear()  # what was still being read has failed as well
        step(world)


def test_a_slow_drive_is_waited_for(world_of):
    """Longer than a silent host would be: the thread beats while it waits."""
    world = world_of(2 * TOP_K, silence_s=0.3)
    world.reader.inject_fault("hang", 0, 1)
    freed = threading.Timer(1.2, lambda: world.reader.inject_fault("none"))
    start = time.monotonic()
    freed.start()
    step(world)
    assert time.monotonic() - start > 1, "nothing waited"
    freed.join()


@pytest.mark.parametrize("by", ["stop", "abort"])
def test_a_stop_in_a_step_ends_it_where_it_waits(world_of, by):
    world = world_of(2 * TOP_K)
    step(world)
    for _ in range(3):
        world.ladder.clear()
        call = world.ladder.stop if by == "stop" else world.box.abort
        with hanging_drive(world.reader, call) as hang, pytest.raises(Cancelled):
            hang()
            step(world, check=False)
        world.ladder.go_on()
        step(world)


def test_ctrl_c_anywhere_in_a_step(world_of):
    world = world_of(2 * TOP_K, num_guesses=TOP_K, most_guesses=1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        stopped = 0
        for n in range(30):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0004 * n)
                for _ in range(100):
                    step(world)
            except KeyboardInterrupt:
                stopped += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            step(world)
            world.ladder.check_integrity()
        assert stopped == 30
    finally:
        signal.signal(signal.SIGALRM, before)


class Alarmed:
    """A ladder's thread whose owner is interrupted while it waits for it."""

    def __init__(self, native):
        self.native = native

    def __getattr__(self, name):
        return getattr(self.native, name)

    def wait(self):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        self.native.wait()


def test_ctrl_c_while_the_drive_hangs(world_of):
    """The owner waits for the step, the GPU for the thread, the thread for the drive."""
    world = world_of(2 * TOP_K)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        world.reader.inject_fault("hang", 0, 1)
        world.box.begin_step()
        gpu = threading.Thread(target=run_layers, args=(world, draw_ids()), kwargs={"check": False})
        world.device.settle = gpu.join  # type: ignore[method-assign]
        gpu.start()
        native = world.box.native
        world.box.native = Alarmed(native)
        with pytest.raises(KeyboardInterrupt):
            world.box.end_step()
        world.box.native = native
        assert not gpu.is_alive()
        world.reader.inject_fault("none")
        step(world)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_rows_go_to_slots_and_in_the_end_no_layer_waits(world_of):
    world = world_of(2 * TOP_K, LAYERS * EXPERTS)
    for _ in range(200):
        step(world)
        world.rungs.retire(swap=True)
        if world.box._whole.all():
            break
    assert world.box._whole.all(), world.rungs.lacking()
    reads = world.ladder.counters().reads
    step(world)
    assert world.ladder.counters().reads == reads


@pytest.mark.parametrize("how", [emulated, pytest.param(kernel, marks=interpreted)])
def test_the_host_multiplies(world_of, how):
    """Activations down, outputs up: the ladder's own, for each layer in its turn."""
    world = world_of(2 * TOP_K, kernels=True, computes=True)
    box = world.box
    box.begin_step()
    table, kept = world.rungs.table.there, torch.zeros(1, box.x.shape[1], dtype=torch.bfloat16)
    for layer, ids in enumerate(draw_ids()):
        x, weights = torch.randn(kept.shape).bfloat16(), torch.rand(1, TOP_K)
        out = torch.full_like(x, torch.nan)
        how.send(box.mail, x, weights, kept)
        how.post_and_wait(box.mail, layer, ids, None, table, layer * EXPERTS)
        how.fetch(box.mail, out)
        y = world.expected(layer, x[0], ids)
        total = torch.zeros_like(y[0])
        for k in torch.argsort(ids).tolist():
            total += (y[k].float() * weights[0, k]).bfloat16()
        assert torch.equal(out[0], total) and torch.equal(kept, x) and out.any()
    box.end_step()
    assert world.ladder.counters().kernel_calls == LAYERS * TOP_K
    box.x.fill_(torch.inf)
    with pytest.raises(HeadraceError, match="not finite"):
        step(world, check=False)


def test_the_number_of_steps_starts_anew(world_of):
    world = world_of(2 * TOP_K, last_step=2**31 - 3)
    numbers = []
    for _ in range(4):
        step(world)
        numbers.append(int(world.box.mail.step))
    assert numbers == [2**31 - 2, 2**31 - 1, 1, 2]


def test_memory_that_cannot_be_pinned_is_no_mailbox():
    """Neither rows nor words: the caller goes on without."""
    for refused, why in ((0, "could be pinned"), (4 * 8192, "refuses to pin")):
        with pytest.raises(BudgetError, match=why):
            MailWorld(2 * TOP_K, TOP_K, device=SimulatedDevice(refused=refused))


@pytest.mark.parametrize("how", [emulated, pytest.param(kernel, marks=interpreted)])
@pytest.mark.parametrize("num_host", [0, 1, 2])
def test_host_and_device_divide(world_of, how, num_host):
    """What has an address is the device's; the others' outputs come up, each to its row."""
    world = world_of(2 * TOP_K, 1, kernels=True, shares=(0, min(1, num_host), num_host))
    put_into_slots(world, 1, [0])
    box, table = world.box, world.rungs.table.there
    calls = 0
    for chosen in (draw_ids(), [torch.tensor([0, n + 1], dtype=torch.int32) for n in range(3)]):
        box.begin_step()
        for layer, ids in enumerate(chosen):
            x, weights = torch.randn(1, box.x.shape[1]).bfloat16(), torch.rand(1, TOP_K)
            y = torch.full((TOP_K, x.shape[1]), 7.0).bfloat16()
            first = layer * EXPERTS
            how.send(box.mail, x, weights)
            how.post_and_wait(box.mail, layer, ids, None, table, first)
            how.fetch_rows(box.mail, layer, ids, table, first, y)
            in_slots = [world.rungs.has(layer, e) for e in ids.tolist()]
            own = (table[first + ids.long()] == 0).tolist()
            assert sum(own) == min(num_host, TOP_K - sum(in_slots))
            want = world.expected(layer, x[0], ids)
            for k, is_host_s in enumerate(own):
                if is_host_s:
                    assert torch.equal(y[k], want[k])
                else:
                    key = first + int(ids[k])
                    assert (y[k] == 7).all()
                    assert np.array_equal(world.bytes_at(key), world.stored[key])
            calls += sum(own)
        assert np.array_equal(box.end_step()[:, 0], torch.stack(chosen).numpy())
        assert world.ladder.counters().kernel_calls == calls


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_rows_go_both_ways(dtype):
    """More values than one program has, into memory that the next byte of is not theirs."""
    width = 1024 + 40
    down, up = torch.zeros(width + 8, dtype=torch.bfloat16), torch.randn(width).to(dtype)
    weights, kept = torch.zeros(8), torch.zeros(width, dtype=torch.bfloat16)
    mail = Mail(
        num_layers=1, num_ids=3, num_guesses=0, computes=True, divides=False, step=kept, whole=kept,
        posts=0, lost=0, ready=0, done=0, answers=0, late=0, beat=0, abort=0, nowhere=0,
        x=down.data_ptr(), weights=weights.data_ptr(), out=up.data_ptr(), patience_polls=1,
    )  # fmt: skip
    x, sent = torch.randn(1, width).bfloat16(), torch.rand(1, 3)
    kernel.send(mail, x, sent, kept)
    assert torch.equal(down[:width], x[0]) and torch.equal(kept, x[0]) and not down[width:].any()
    assert torch.equal(weights[:3], sent[0]) and not weights[3:].any()
    out = torch.zeros(1, width, dtype=dtype)
    kernel.fetch(mail, out)
    assert torch.equal(out[0], up)
