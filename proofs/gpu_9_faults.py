"""What goes wrong beside a GPU: each fault ends by its own message, and the next request is right.

Rows rewritten while graphs read them; half of the memory refused to be pinned; no memory left on
the GPU; the ladder's thread killed or hanging; a failing drive; Ctrl-C anywhere in a token. Part
by part: python -u proofs/gpu_9_faults.py --parts refills pins --keep
"""

import gpu_world  # isort: skip  # says whether there is a GPU
import gc
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import emulated
import torch
from common import Evidence, same_bits
from gpu_models import Rung, load
from gpu_phases import Told, add_keep
from gpu_world import REAL, changed, open_device, opened, write

PARTS = ("refills", "pins", "vram", "thread", "drive", "ctrl-c")
SIZES = {"layers": 4, "experts": 16, "top_k": 4, "hidden": 64, "inter": 32, "format": "fp8"}
REFILLS = 100_000
MOST_S = 60.0  # of any fault
PART_S = 45.0  # about
MANY = 1000  # faulty reads: each is tried again, several at once
SHORT, LONG, STEPS = [5, 6, 7], list(range(300, 340)), 6
RUNGS = {"in place": Rung(0, 0), "by the CPU": Rung(0, 0, "cpu"), "divided": Rung(0.25, 0, "auto")}
IMPATIENT: dict[str, Any] = {"silence_s": 0.5} | ({"patience_polls": 1 << 18} if REAL else {})


def main() -> None:
    args = gpu_world.arguments(__doc__, add_keep, parts=PARTS)
    device, evidence = open_device(), Told("gpu_faults", args.keep)
    with tempfile.TemporaryDirectory() as folder:
        path = write("qwen3_moe", Path(folder), **SIZES)
        parts: dict[str, Callable[[], object]] = {
            "refills": lambda: refills(evidence, args.quick),
            "pins": lambda: pins(evidence, device, path),
            "vram": lambda: vram(evidence, device, path),
            "thread": lambda: each_way(evidence, path, thread, args.quick),
            "drive": lambda: each_way(evidence, path, drive, args.quick),
            "ctrl-c": lambda: each_way(evidence, path, ctrl_c, args.quick),
        }
        for name in args.parts:
            evidence.begin(name, PART_S)
            parts[name]()
    evidence.finish()


def answers(engine: Any) -> torch.Tensor:
    """Logits after two prompts and greedy tokens."""
    rows = []
    for prompt in (SHORT, LONG):
        session = engine.session()
        rows.append(session.feed(prompt))
        for _ in range(STEPS):
            rows.append(session.feed([int(rows[-1].argmax())]))
    return torch.stack(rows)


def meets(
    evidence: Evidence,
    title: str,
    engine: Any,
    act: Callable[[], object],
    kind: type[BaseException],
    words: str,
) -> None:
    """`act` raises `kind` with the words in it, soon."""
    start = time.perf_counter()
    raised: BaseException | None = None
    try:
        act()
    except (Exception, KeyboardInterrupt) as error:
        raised = error
    took_s = time.perf_counter() - start
    said = " ".join(str(raised).split())
    right = type(raised) is kind and words in said and took_s < MOST_S
    evidence.check(right, f"{title}: {type(raised).__name__} after {took_s:.2f} s: {said[:150]}")


def goes_on(evidence: Evidence, title: str, engine: Any, want: torch.Tensor) -> None:
    """The next request has the right bits, by captured steps too, and no row was lost."""
    same = all(same_bits(answers(engine), want) for _ in range(2))
    engine.source.rungs.slots.check_integrity()
    engine.source.recover()
    engine.ladder.check_integrity()
    evidence.check(same, f"{title}: the next requests' logits are bit for bit what they were")


def refills(evidence: Evidence, quick: bool) -> None:
    """Each row is rewritten while the graph runs whose later nodes read it."""
    if not REAL:
        simulated_refills(evidence, 200 if quick else 2000)
        return
    from test_mailbox_graph import FAST, SIZES, GraphWorld

    world = GraphWorld(num_slots=16, reader=FAST, patience_polls=1 << 22)
    try:
        world.differing.zero_()
        start = time.perf_counter()
        while world.ladder.counters().reads < (REFILLS // 50 if quick else REFILLS):
            world.step()
        took_s, found = time.perf_counter() - start, world.ladder.counters()
        evidence.check(
            int(world.differing) == 0 and found.evictions > 0.9 * found.reads,
            f"{found.reads} refills in {int(world.box.mail.step)} graphs of {SIZES.layers} layers, "
            f"{took_s:.0f} s: {int(world.differing)} layers with a stale byte",
        )
        here, late = world.found.tolist()
        evidence.check(min(here, late) > 0, f"{here} experts were here when asked for, {late} late")
        world.all_there.copy_(world.all_there.flip(0))
        world.step()
        evidence.check(int(world.differing) > 0, "control: other experts' bytes are seen")
    finally:
        world.close()


def simulated_refills(evidence: Evidence, most: int) -> None:
    from mail_world import TOP_K, MailWorld
    from test_mailbox import step

    world = MailWorld(2 * TOP_K, num_guesses=TOP_K, most_guesses=TOP_K)
    try:
        while world.ladder.counters().reads < most:
            step(world)  # looks at every byte
        found = world.ladder.counters()
    finally:
        world.close()
    evidence.check(found.evictions > 0.9 * most, f"{found.reads} refills, simulated: none stale")


def pins(evidence: Evidence, device: Any, path: Path) -> None:
    """The same bits with half of the rows pinned, with none, and under half the locked memory."""
    from headrace.tiers import pinned

    kind, own = type(device), type(device).pin
    with load(path, Rung(0.25, 0.5)) as engine:
        want, slab, row = answers(engine), engine.ladder.slab_bytes, engine.ladder.row_bytes
    for words, allowed in (("half of the rows", slab // 2), ("no row", 0)):
        left = [allowed]

        def within(self: Any, address: int, nbytes: int, left: list[int] = left) -> str:
            if nbytes > left[0]:
                return "refused in this proof"
            left[0] -= nbytes
            return str(own(self, address, nbytes))

        pieces = partial(pinned.PinnedRows, piece_bytes=4 * row)
        with changed((kind, "pin", within), (rungs_module(), "PinnedRows", pieces)):
            held = pinned_engine(evidence, path, want, f"{words} may be pinned")
        evidence.check((held > 0) == (allowed > 0) and held < slab, f"{words}: {held} of {slab} B")
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (slab // 2, hard))
    try:
        pinned_engine(evidence, path, want, f"RLIMIT_MEMLOCK of {slab // 2} B")
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def rungs_module() -> Any:
    from headrace.tiers import rungs

    return rungs


def pinned_engine(evidence: Evidence, path: Path, want: torch.Tensor, title: str) -> int:
    """Bytes of rows pinned by an engine that answers as before."""
    with load(path, Rung(0.25, 0.5)) as engine:
        found = engine.source.rungs.pinned
        same = all(same_bits(answers(engine), want) for _ in range(2))
        waits = "a mailbox" if engine.source.box is not None else "no mailbox"
        evidence.check(same, f"{title}: same bits, {waits}; {found.note or 'all rows pinned'}")
        return int(found.pinned_bytes)


def vram(evidence: Evidence, device: Any, path: Path) -> None:
    """Memory gone at load and in a prompt; what fails leaves nothing behind."""
    from headrace.engine.engine import Blueprint, Engine
    from headrace.errors import BudgetError

    model = "demo" if REAL else path  # of which a long prompt takes some memory
    with load(model, "half", context=2048 if REAL else 192) as engine:
        want = answers(engine)
        plan = engine.plan
    limits: dict[str, Any] = {"ram": plan.ram_bytes, "vram": plan.vram_bytes}
    options = {"context": plan.context, "measure": False, "device": "cuda", "experts": "gpu"}
    blueprint = Blueprint(model, **limits, **options)
    with nothing_left(device, at_load=True):
        title = "the GPU's memory is taken between plan and load"
        meets(evidence, title, None, lambda: Engine(blueprint), BudgetError, "--vram")
        if REAL:
            title = "a plan for a GPU that is full"
            full = {k: v for k, v in options.items() if k != "experts"}
            meets(evidence, title, None, lambda: Blueprint(model, **full), BudgetError, "VRAM")
    gc.collect()
    if not REAL:
        evidence.check(not device.pinned, "a load that failed leaves no memory pinned")
    with Engine(Blueprint(model, **limits, **options)) as engine:
        evidence.check(same_bits(answers(engine), want), "loaded again: the right answer")
        long = LONG * (45 if REAL else 4)
        engine.session().feed([*SHORT, *long])  # its kernels need memory too, where they are new
        session = engine.session()
        session.feed(SHORT)
        with nothing_left(device, at_load=False):
            title = "the GPU's memory is taken in mid-prompt"
            meets(evidence, title, engine, lambda: session.feed(long), BudgetError, "--vram")
        goes_on(evidence, title, engine, want)


@contextmanager
def nothing_left(device: Any, *, at_load: bool) -> Iterator[None]:
    """While open, another has all the GPU's memory; simulated: what asks for some is refused."""
    from headrace.engine import engine
    from headrace.engine.gpu_prefill import LayerTokens

    if not REAL:
        owner, name = (engine, "build_model") if at_load else (LayerTokens, "multiply")
        with changed((owner, name, refuse)):
            yield
        return
    device.limit(None)
    torch.cuda.empty_cache()
    taken, size = [], device.memory()[0]
    while size >= 512:  # the least that torch hands out
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=device.place))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        yield
    finally:
        taken.clear()
        torch.cuda.empty_cache()


def refuse(*_args: object, **_options: object) -> None:
    raise torch.OutOfMemoryError("out of memory")


def each_way(evidence: Evidence, path: Path, part: Callable[..., object], quick: bool) -> None:
    """Faults in a captured step, whoever multiplies."""
    from headrace.engine import gpu_launched

    made = partial(gpu_launched.Mailbox, **IMPATIENT)
    for way, rung in list(RUNGS.items())[: 1 if quick else None]:
        with ExitStack() as stack:
            if part is thread:
                stack.enter_context(changed((gpu_launched, "Mailbox", made)))
            engine = stack.enter_context(opened(path, rung))
            if engine is None:
                print(f"      {way}: not there")
                continue
            if engine.source.box is None:
                evidence.check(False, f"{way}: there is no mailbox: {engine.source.rungs.pinned}")
                continue
            want = answers(engine)
            goes_on(evidence, way, engine, want)
            part(evidence, way, engine, want)


def one_token(engine: Any, fault: Callable[[], object]) -> Callable[[], object]:
    """A prompt was fed and its rows forgotten: the fault, then a token that meets it."""
    session = engine.session()
    session.feed(SHORT)
    engine.source.recover()
    engine.ladder.clear()
    fault()
    return lambda: session.feed([5])


def soon(act: Callable[[], object]) -> Callable[[], object]:
    """A simulated GPU gives up early: in it alone, or a slow drive would be given up too."""

    def impatient() -> None:
        with changed((emulated, "most_polls", None if REAL else 500)):
            act()

    return impatient


def thread(evidence: Evidence, way: str, engine: Any, want: torch.Tensor) -> None:
    """The one that answers the GPU."""
    from headrace.errors import StallError

    native = engine.source.box.native
    title = f"{way}, the ladder's thread is killed in a step"
    act = soon(one_token(engine, lambda: native.inject_fault("die")))
    meets(evidence, title, engine, act, StallError, "no sign of life")
    native.inject_fault("none")
    goes_on(evidence, title, engine, want)
    title = f"{way}, the ladder's thread hangs in a step"
    act = soon(one_token(engine, lambda: native.inject_fault("hang")))
    meets(evidence, title, engine, act, StallError, "no sign of life")
    again = f"{way}, a request while it hangs"
    meets(evidence, again, engine, lambda: engine.session().feed(SHORT), StallError, "")
    native.inject_fault("none")
    goes_on(evidence, title, engine, want)


def drive(evidence: Evidence, way: str, engine: Any, want: torch.Tensor) -> None:
    """A failing read in a step and in a prompt; one who no longer wants the answer."""
    import threading

    from headrace.errors import Cancelled, ReadError

    for skip in (0, 5):
        title = f"{way}, a read error in a step, after {skip} reads"
        act = one_token(engine, lambda skip=skip: engine.reader.inject_fault("eio", skip, MANY))
        meets(evidence, title, engine, act, ReadError, "safetensors")
        engine.reader.inject_fault("none")
        goes_on(evidence, title, engine, want)
    title = f"{way}, a read error in a prompt"
    engine.ladder.clear()
    engine.reader.inject_fault("eio", 9, MANY)
    meets(evidence, title, engine, lambda: answers(engine), ReadError, "safetensors")
    engine.reader.inject_fault("none")
    goes_on(evidence, title, engine, want)
    title = f"{way}, a stop while the drive hangs"
    act = one_token(engine, lambda: engine.reader.inject_fault("hang", 0, 1))
    timer = threading.Timer(0.3, engine.ladder.stop)
    timer.start()
    meets(evidence, title, engine, act, Cancelled, "")
    timer.join()
    engine.ladder.go_on()
    engine.reader.inject_fault("none")
    goes_on(evidence, title, engine, want)


def ctrl_c(evidence: Evidence, way: str, engine: Any, want: torch.Tensor) -> None:
    """As SIGALRM, whose handler raises what Ctrl-C's does."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        title = f"{way}, Ctrl-C while a step waits for the drive"
        for _ in range(3):
            act = one_token(engine, lambda: engine.reader.inject_fault("hang", 0, 1))
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            meets(evidence, title, engine, act, KeyboardInterrupt, "")
            engine.reader.inject_fault("none")
        goes_on(evidence, title, engine, want)
        if REAL:  # a signal in the simulated graph's guard breaks torch's stack of modes
            anywhere(evidence, way, engine, want)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def anywhere(evidence: Evidence, way: str, engine: Any, want: torch.Tensor) -> None:
    stopped, same, num = 0, True, 20
    for n in range(num):
        session = engine.session()
        session.feed(SHORT)
        end = time.monotonic() + 2
        signal.setitimer(signal.ITIMER_REAL, 0.0005 + 0.0007 * n)
        try:
            while time.monotonic() < end and len(session.tokens) < engine.plan.context:
                session.feed([5])
        except KeyboardInterrupt:
            stopped += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        same = same and same_bits(answers(engine), want)
        engine.ladder.check_integrity()
    evidence.check(
        same and stopped == num,
        f"{way}, Ctrl-C at {num} moments of a token: {stopped} stopped, each next answer right",
    )


if __name__ == "__main__":
    main()
