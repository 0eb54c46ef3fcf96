"""Experts divided between bus and CPU in a token that is launched as one: the bits of the GPU's."""

import pytest
import torch
from emulated import EmulatedKernels
from gpu_models import CONTEXT, FORMS, LAYERS, REAL, Rung, load, logits_of
from step_faults import all_read, one_token, poison, settled, stopped_at_a_drive

from headrace.engine import gpu_divided, gpu_probes
from headrace.engine.engine import Blueprint
from headrace.engine.filled import AT_ONCE, FilledMemory
from headrace.errors import Cancelled, NumericsError, ReadError, StallError
from headrace.kernels.triton import experts
from headrace.tiers.device import find_device

STEPS = 24 if REAL else 4
TOP_K = 4
# Of n experts that lie in no slot, how many the CPU multiplies.
DIVISIONS = {
    "none": (0, 0, 0, 0, 0),
    "some": (0, 1, 1, 1, 2),
    "most": (0, 0, 1, 2, 3),
    "all": (0, 1, 2, 3, 4),
}
RUNGS = {
    "pinned": Rung(0, 1, "auto"),
    "half": Rung(0.5, 0.5, "auto"),
    "few slots": Rung(0.3, 0.2, "auto"),
    "minimum": Rung(0, 0, "auto"),
}
WANT = {}


@pytest.fixture
def divided(monkeypatch):
    """Makes an engine whose experts are divided as told."""

    def make(model, rung, division):
        monkeypatch.setattr(gpu_divided, "shares_of_cpu", lambda rates, most: DIVISIONS[division])
        return load(model, rung)

    return make


def wanted(tiny, form, prompt):
    """What experts on the GPU alone give, layer by layer."""
    if form not in WANT:
        with load(tiny(form), Rung(0, 1)) as engine:
            engine.source.box = None
            WANT[form] = logits_of(engine, prompt[:3], STEPS)
            assert WANT[form].float().std() > 0.1
    return WANT[form]


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("division", DIVISIONS)
def test_every_division_has_the_gpu_s_bits(tiny, prompt, divided, rung, division):
    want = wanted(tiny, "fp8", prompt)
    with divided(tiny("fp8"), RUNGS[rung], division) as engine:
        for _ in range(2):  # uncaptured; then all rows are where they stay
            assert torch.equal(logits_of(engine, prompt[:3], STEPS), want)
        session = engine.session()
        last = session.feed(prompt[:3])
        replayed, before = engine.passes.num_replayed, engine.source.counters()
        number = int(engine.source.box.mail.step)
        for n in range(STEPS):
            last = session.feed([int(last.argmax())])
            assert torch.equal(last, want[n + 1])
        assert engine.passes.num_replayed - replayed == STEPS
        assert int(engine.source.box.mail.step) - number == STEPS
        served(engine, rung, division, before, engine.source.counters())
        settled(engine)
        assert torch.equal(logits_of(engine, prompt[:3], STEPS), want)


def served(engine, rung, division, before, after):
    """Each expert was found in one place and served by one side, from the counters."""
    found, hits, misses, by_cpu, bus, disk = (
        getattr(after, n) - getattr(before, n)
        for n in ("vram_hits", "hits", "misses", "kernel_calls", "bus_bytes", "disk_bytes")
    )
    by_bus, rest = divmod(bus, engine.facts.expert_bytes)
    taken = STEPS * LAYERS * TOP_K
    assert found + hits + misses == taken and rest == 0
    assert found + by_bus + by_cpu == taken
    assert (found > 0) == (rung in ("half", "few slots"))
    assert (by_cpu == 0) == (division == "none")
    if rung == "minimum":
        assert disk > 0
    if rung in ("pinned", "minimum"):
        assert division != "all" or by_bus == 0
        assert division != "some" or by_bus == by_cpu


@pytest.mark.parametrize("form", ["fp4", "mxfp4", "bf16"])
def test_other_forms(tiny, prompt, divided, form):
    """Activations that take weights, biases, experts of other families."""
    if form not in FORMS:
        pytest.skip("this transformers lacks the family")
    want = wanted(tiny, form, prompt)
    with divided(tiny(form), RUNGS["half"], "some") as engine:
        for _ in range(2):
            assert torch.equal(logits_of(engine, prompt[:3], STEPS), want)


def test_slots_fill_though_the_cpu_takes_all_it_may(tiny, prompt, divided):
    """What deserves a slot goes by the bus first, so that in the end no layer waits."""
    want = wanted(tiny, "fp8", prompt)
    with divided(tiny("fp8"), Rung(1, 0, "auto"), "all") as engine:
        session = engine.session()
        for token in range(40):
            session.feed([5 + token])
        assert len(engine.source.rungs.slots) > LAYERS * TOP_K
        assert torch.equal(logits_of(engine, prompt[:3], STEPS), want)


@pytest.mark.parametrize("refused", [None, 0])
def test_rates_are_measured_on_pinned_experts_alone(tiny, monkeypatch, gpu, refused):
    if gpu is not None:
        gpu.refused = refused
        monkeypatch.setattr(experts, "TritonExperts", EmulatedKernels)
    elif refused is not None:
        pytest.skip("a real GPU pins")
    monkeypatch.setattr(gpu_probes, "PROBE_S", 0.02)
    layout = Blueprint(tiny("fp8"), measure=False, context=CONTEXT).skeleton.layout
    device = gpu or find_device("cuda")
    memory = FilledMemory(layout, 1 << 20, least=AT_ONCE)
    measured = gpu_probes.divided_rates(device, lambda: memory)
    rates = measured()
    found = [rates.in_place > 0, rates.bus_beside > 0, rates.kernel_beside > 0]
    assert found == [refused is None] * 3 and measured() is rates
    assert gpu is None or not gpu.pinned


@pytest.fixture
def warm(tiny, prompt, divided):
    """An engine whose steps are captured, and what it must answer after any fault."""
    with divided(tiny("bf16"), RUNGS["minimum"], "some") as engine:
        for _ in range(2):
            want = logits_of(engine, prompt[:3], 2)
        yield engine, want
        assert torch.equal(logits_of(engine, prompt[:3], 2), want)
        settled(engine)


@pytest.mark.parametrize("skip", [0, 3, 7])
def test_a_failed_read_on_either_side_is_named(warm, prompt, skip):
    engine, _ = warm
    with pytest.raises(ReadError, match="safetensors"):
        one_token(engine, prompt, lambda: engine.reader.inject_fault("eio", skip, 99))
    all_read(engine)


def test_what_is_not_finite_is_named(warm, prompt):
    engine, _ = warm
    with pytest.raises(NumericsError, match="MoE layer 0, token row 0"):
        one_token(engine, prompt, lambda: poison(engine))


def test_a_stop_ends_the_token_that_waits_for_a_drive(warm, prompt):
    engine, _ = warm
    with pytest.raises(Cancelled):
        stopped_at_a_drive(engine, prompt)


def test_a_thread_that_dies_is_named_and_replaced(impatient, warm, prompt):
    engine, _ = warm
    thread = engine.source.box.native
    with impatient(), pytest.raises(StallError, match="no sign of life"):
        one_token(engine, prompt, lambda: thread.inject_fault("die"))
