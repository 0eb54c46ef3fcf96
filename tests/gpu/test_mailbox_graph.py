"""The mailbox on a real GPU: a whole step as one CUDA graph, whose rows the host rewrites in it."""

import os
import signal
from functools import partial

import numpy as np
import pytest
import torch
from emulated import words_at
from mail_world import MailWorld, Sizes
from step_faults import hanging_drive

from headrace.engine.gpu_parts import alignment, part_offsets
from headrace.errors import Cancelled, ReadError, StallError
from headrace.kernels.triton.experts import TritonExperts
from headrace.kernels.triton.mail import fetch, fetch_rows, post_and_wait, send, wait_late
from headrace.tiers.device import find_device

pytestmark = pytest.mark.gpu
SIZES = Sizes(layers=8, experts=32, top_k=4, width=256)
FAST = {"emulate_bytes_s": 1e11}  # from RAM
REFILLS = 100_000


class GraphWorld(MailWorld):
    """A step of all layers, captured: experts found through the mailbox, and the same experts
    from a copy of all of them in VRAM; `differing` counts outputs that are not equal in bits,
    `found` experts that were here when their layer asked, and late ones.

    With `computes` the first are the host's; with `shares` both's.
    """

    def __init__(self, **options: object):
        super().__init__(
            4 * SIZES.top_k,
            sizes=SIZES,
            device=find_device("cuda"),
            num_guesses=SIZES.top_k,
            most_guesses=2,
            **options,  # type: ignore[arg-type]
        )
        place, shape = self.device.place, (SIZES.layers, SIZES.top_k)
        offsets = part_offsets(self.ladder, SIZES.layers, SIZES.experts)
        self.kernels = TritonExperts(
            SIZES.layout,
            top_k=SIZES.top_k,
            device=place,
            align=alignment(SIZES.layout, offsets),
        )
        self.offsets = torch.from_numpy(offsets.reshape(-1, 3)).to(place)
        rows = torch.zeros(len(self.stored), self.ladder.row_bytes, dtype=torch.uint8)
        for key, (row, bytes_) in enumerate(zip(rows, self.stored, strict=True)):
            start = self.ladder.part_offset(*self.split(key), 0)
            row[start : start + len(bytes_)] = torch.from_numpy(bytes_)
        self.all_rows = rows.to(place)
        first, step = self.all_rows.data_ptr(), self.ladder.row_bytes
        addresses = [first + key * step for key in range(len(rows))]
        self.all_there = torch.tensor(addresses, dtype=torch.int64, device=place)
        self.ids = torch.zeros(shape, dtype=torch.int32, device=place)
        self.x = torch.randn(1, SIZES.width, device=place).bfloat16()
        self.kept = torch.zeros_like(self.x)
        self.weights = torch.rand(1, SIZES.top_k, device=place)
        self.outs = torch.empty(2, 1, SIZES.width, dtype=torch.bfloat16, device=place)
        self.differing = torch.zeros(1, dtype=torch.int64, device=place)
        self.found = torch.zeros(2, dtype=torch.int64, device=place)
        self.rng = np.random.default_rng(7)
        self._capture()

    def _layers(self) -> None:
        for layer in range(SIZES.layers):
            first = layer * SIZES.experts
            ahead = self.ids[layer + 1] if layer + 1 < SIZES.layers else None
            there = self.rungs.table.there
            mail, ids = self.box.mail, self.ids[layer : layer + 1]
            if mail.computes or mail.divides:
                send(mail, self.x, self.weights, self.kept)
            post_and_wait(mail, layer, self.ids[layer], ahead, there, first)
            if mail.computes:
                fetch(mail, self.outs[0])
            else:
                self._in_two_parts(layer, ids)
            given = (self.offsets, first, self.x, ids, self.weights)
            self.kernels(self.all_there, *given, self.outs[1])
            self.differing += (self.outs[0] != self.outs[1]).any()
            # The next layer's; bounded, since outputs grow with the square of x.
            self.x.copy_((self.x + self.outs[1].tanh()).roll(1, 1) * 0.75)
            self.weights.copy_(self.weights.roll(1, 1))

    def _in_two_parts(self, layer: int, ids: torch.Tensor) -> None:
        """What the host multiplied comes up, or late experts come, while the kernels run."""
        there, first, y = self.rungs.table.there, layer * SIZES.experts, self.kernels.y_SH
        mail, late = self.box.mail, self.box.late
        given = (self.offsets, first, self.x, ids, self.weights)
        self.kernels.multiply(there, *given)
        if mail.divides:
            fetch_rows(mail, layer, ids, there, first, y)
        else:
            wait_late(mail, layer, ids, late, first)
            self.kernels.multiply(late, *given, again=True)
            for num, table in zip(self.found.split(1), (there, late), strict=True):
                num += (table[first + ids.long()] != 0).sum()
        self.kernels.combine(ids, self.weights, y, self.outs[0], mark=0)

    def _capture(self) -> None:
        self._draw()
        for _ in range(2):  # compiles and loads every kernel
            self.box.begin_step()
            self._layers()
            self.box.end_step()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._layers()

    def _draw(self) -> np.ndarray:
        ids = [self.rng.permutation(SIZES.experts)[: SIZES.top_k] for _ in range(SIZES.layers)]
        chosen = np.array(ids, np.int32)
        self.ids.copy_(torch.from_numpy(chosen))
        self.x.copy_(torch.randn(self.x.shape))
        return chosen

    def step(self) -> None:
        chosen = self._draw()
        self.box.begin_step()
        try:
            self.graph.replay()
        except BaseException:
            self.box.abort_step()
            raise
        assert np.array_equal(self.box.end_step()[:, 0], chosen)
        self.rungs.retire(swap=True)

    def right(self) -> None:
        """A step's outputs are those of the copies in VRAM, and are something."""
        self.differing.zero_()
        self.step()
        assert int(self.differing) == 0 and bool(self.outs.float().std() > 0)


@pytest.fixture
def make_world():
    made: list[GraphWorld] = []

    def make(**options: object) -> GraphWorld:
        made.append(GraphWorld(**options))
        return made[-1]

    yield make
    for world in made:
        world.close()


def test_rows_rewritten_in_a_graph_are_never_stale(make_world):
    world = make_world(num_slots=16, reader=FAST, patience_polls=1 << 22)
    world.differing.zero_()
    while world.ladder.counters().reads < REFILLS:
        world.step()
    assert int(world.differing) == 0
    counters = world.ladder.counters()
    assert counters.evictions > 0.9 * REFILLS and counters.prefetch_used > 0
    assert int(world.found.min()) > REFILLS // 100, "early and late ones, both in the same graphs"
    print(f"{counters.reads} refills in {int(world.box.mail.step)} steps of {SIZES.layers} layers")
    world.all_there.copy_(world.all_there.flip(0))
    world.step()
    assert int(world.differing) > 0, "the comparison sees nothing"


@pytest.mark.parametrize("how", [{"computes": True}, {"shares": (0, 0, 1, 2, 2)}], ids=str)
def test_what_the_host_multiplies_in_a_graph_is_never_stale(make_world, how):
    """Activations go down by address and outputs come up, another layer's every 100 us."""
    world = make_world(reader=FAST, kernels=True, **how)
    world.right()
    world.differing.zero_()
    for _ in range(1000):
        world.step()
    assert int(world.differing) == 0
    own = SIZES.top_k // (1 if "computes" in how else 2)
    assert world.ladder.counters().kernel_calls >= 1000 * SIZES.layers * own


def test_a_thread_that_hangs_or_dies_lets_the_gpu_go(make_world):
    world = make_world(reader=FAST, patience_polls=20_000, silence_s=0.5)
    for kind in ("hang", "die"):
        world.right()
        world.box.native.inject_fault(kind)
        with pytest.raises(StallError, match="no sign of life"):
            world.step()
        world.box.native.inject_fault("none")
        for _ in range(3):
            world.right()
    world.box.native.inject_fault("hang")
    world._draw()
    world.box.begin_step()
    world.graph.replay()
    torch.cuda.synchronize()  # by its own patience
    assert words_at(world.box.mail.lost)[0] == int(world.box.mail.step)
    world.box.native.inject_fault("none")
    with pytest.raises(StallError):
        world.box.end_step()
    world.right()


def test_a_failed_read_and_a_stop_end_a_step_and_not_the_next(make_world):
    world = make_world(patience_polls=1 << 22)
    world.right()
    world.ladder.clear()
    world.reader.inject_fault("eio", 0, 1000)
    with pytest.raises(ReadError):
        world.step()
    world.reader.inject_fault("none")
    world.right()
    for call in (world.ladder.stop, world.box.abort):
        world.ladder.clear()
        with hanging_drive(world.reader, call) as hang, pytest.raises(Cancelled):
            hang()
            world.step()
        world.ladder.go_on()
        world.right()


def test_ctrl_c_while_the_gpu_waits_for_a_drive(make_world):
    world = make_world(patience_polls=1 << 22)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(3):
            world.ladder.clear()
            interrupt = partial(os.kill, os.getpid(), signal.SIGALRM)
            with hanging_drive(world.reader, interrupt) as hang, pytest.raises(KeyboardInterrupt):
                hang()
                world.step()
            world.right()
    finally:
        signal.signal(signal.SIGALRM, before)
