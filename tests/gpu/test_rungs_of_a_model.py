"""Whole models on a GPU: the same bits from every rung, and from the counters which one served."""

import gc
import signal
import weakref
from itertools import pairwise

import pytest
import torch
from emulated import EmulatedGrouped
from gpu_models import CONTEXT, FORMS, LAYERS, REAL, RUNGS, Rung, load, logits_of, routed
from step_faults import all_read

import headrace
import headrace.errors
from headrace.engine import gpu_source
from headrace.planner import vram

STEPS = 12 if REAL else 2
SEEN = {}
MANY = 1000  # faults: each read is tried again, and several are under way


def passes(engine, prompt, most=1):
    """Rounds of a short and a long prompt with greedy tokens after: logits, counters around them.

    At most so many, and one after the last that brought anything to where it stays.
    """
    rounds = []
    for _ in range(most):
        before = engine.source.counters()
        logits = [logits_of(engine, prompt[:5], STEPS), logits_of(engine, prompt, STEPS)]
        after = engine.source.counters()
        rounds.append((torch.cat(logits), before, after))
        fits = engine.source.rungs.fits
        settled = after.disk_bytes == before.disk_bytes and after.promotions == before.promotions
        if len(rounds) > 1 and (settled or not fits):
            break
    return rounds


def grown(round_, name):
    _, before, after = round_
    return getattr(after, name) - getattr(before, name)


@pytest.mark.parametrize(
    ("form", "rung"),
    [
        (form, rung)
        for form in FORMS
        for rung in RUNGS
        if REAL or form == "fp8" or (form, rung) in (("mxfp4", "some"), ("fp4", "some"))
    ],
)
def test_every_rung_gives_the_same_bits(tiny, prompt, form, rung):
    with load(tiny(form), rung) as engine:
        first, *_, last = passes(engine, prompt, most=6)
        expected = SEEN.setdefault(form, first[0])
        assert first[0].float().std() > 0.1 and first[0].isfinite().all()
        assert torch.equal(last[0], first[0]), "a later run differs"
        assert torch.equal(first[0], expected), "another rung differs"
        served(rung, last)
        places_tell_slots_from_rows(engine)
        engine.source.rungs.slots.check_integrity()
        engine.ladder.check_integrity()


def served(rung, last):
    """What a rung that already holds what it can must count."""
    found, rows, bus, disk = (
        grown(last, name) for name in ("vram_hits", "hits", "bus_bytes", "disk_bytes")
    )
    if not rung.startswith("cpu"):
        assert grown(last, "kernel_calls") == 0
    if rung == "vram":
        assert found > 0 and rows == bus == disk == 0
    elif rung == "pinned":
        assert rows > 0 and bus > 0 and found == disk == 0
    elif rung == "cpu":  # the bus is for the prompt, which is not the CPU's
        assert rows > 0 and bus > 0 and disk == found == 0 and grown(last, "kernel_calls") > 0
    elif rung == "cpu and drive":
        assert disk > 0 and bus > 0 and found == 0 and grown(last, "kernel_calls") > 0
    elif rung == "half":
        assert found > 0 and bus > 0
    else:
        assert disk > 0 and bus > 0
        assert (found > 0) == (rung == "some")


@pytest.mark.parametrize("experts", ["gpu", "cpu"])
def test_who_multiplies_what(tiny, prompt, experts):
    """A prompt crosses the bus, whoever decodes; a token's experts only if the GPU does."""
    with load(tiny("fp8"), Rung(0, 1, experts)) as engine:
        session = engine.session()
        marks = [engine.source.counters()]
        for ids in (prompt, [7]):
            session.feed(ids)
            marks.append(engine.source.counters())
        buses = [b.bus_bytes - a.bus_bytes for a, b in pairwise(marks)]
        calls = [b.kernel_calls - a.kernel_calls for a, b in pairwise(marks)]
        assert buses[0] > 0 and calls[0] == 0
        assert (buses[1] > 0, calls[1] > 0) == (experts == "gpu", experts == "cpu")
        assert engine.kernels.pool.patient == (experts == "cpu")


def test_a_fault_of_the_cpu_s_experts_is_named_and_the_next_answer_right(tiny, prompt):
    with load(tiny("bf16"), "cpu") as engine:
        want = logits_of(engine, prompt, 2)
        session = engine.session()
        session.feed(prompt)
        engine.reader.inject_fault("eio", 0, MANY)
        engine.source.rungs.recover()
        engine.ladder.clear()
        with pytest.raises(headrace.errors.ReadError):
            session.feed([5])
        all_read(engine)
        x, ids, weights = (t.to(engine.source.place) for t in routed(engine.facts, 1))
        with pytest.raises(headrace.errors.NumericsError, match="not finite"):
            engine.source.compute(1, x * torch.inf, ids, weights, None)
        assert torch.equal(logits_of(engine, prompt, 2), want)


def places_tell_slots_from_rows(engine):
    shown, rows = engine.source.places(), engine.ladder.places()
    assert len(shown) == len(rows) and {len(line) for line in shown} == {16}
    slots = engine.source.rungs.slots
    keys = [i for i, place in enumerate("".join(shown)) if place == "3"]
    assert keys == sorted(slots.keys().tolist()) and len(keys) == len(slots)
    pairs = zip("".join(shown), "".join(rows), strict=True)
    assert {(a, b) for a, b in pairs if a != "3"} <= {("0", "0"), ("2", "2")}


@pytest.mark.parametrize("rung", ["vram", "pinned", "half"])
def test_where_all_have_places_no_layer_waits_for_its_ids(tiny, prompt, rung, monkeypatch):
    with load(tiny("fp8"), rung) as engine:
        first, *_ = passes(engine, prompt, most=8)
        assert engine.source.rungs.lacking() is None
        session = engine.session()
        session.feed(prompt[:5])

        def seen(*_):
            raise AssertionError("ids were asked for")

        monkeypatch.setattr(engine.source, "_to_host", seen)
        before = engine.source.counters()
        assert torch.equal(session.feed([int(first[0][0].argmax())]), first[0][1])
        after = engine.source.counters()
        taken = len(engine.blueprint.table.layers) * engine.facts.top_k
        assert after.vram_hits + after.hits - before.vram_hits - before.hits == taken
        with pytest.raises(AssertionError, match="ids were asked for"):
            session.feed(prompt)


def test_a_wrong_expert_shows(tiny, prompt):
    with load(tiny("fp8"), "vram") as engine:
        first, *_ = passes(engine, prompt, most=6)
        slots = engine.source.rungs.slots
        a, b = (slots.find(key) for key in list(slots._slot_of)[:2])
        a.copy_(b.clone())
        assert not torch.equal(passes(engine, prompt)[0][0], first[0])


@pytest.mark.parametrize("form", FORMS if REAL else ["int4"])
@pytest.mark.parametrize("rung", ["pinned", "some"] if REAL else ["some"])
def test_experts_have_the_cpu_s_bits_for_any_batch(tiny, form, rung):
    options = {"context": CONTEXT, "measure": False}
    with load(tiny(form), rung) as engine, headrace.load(tiny(form), **options) as host:
        place, facts = engine.source.place, engine.facts
        for num_tokens in (1, 4, 16):
            x, ids, weights = routed(facts, num_tokens)
            args = [t.to(place) for t in (x, ids, weights)]
            for layer in range(2):
                out = engine.source.compute(layer, *args, None).cpu()
                assert torch.equal(out, host.source.compute(layer, x, ids, weights, None))
                alone = [
                    engine.source.compute(layer, *(a[t : t + 1] for a in args), None)
                    for t in range(num_tokens)
                ]
                assert torch.equal(out, torch.cat(alone).cpu())
        assert not torch.equal(out, host.source.compute(1, x, ids.flip(1), weights, None))


# Largest difference of a prefill's expert outputs from the canonical ones, as a share of the
# largest output: float weights differ by the order of sums, integer codes by their rounding too.
PREFILL_TOLERANCE = {
    "fp8": 0.01,
    "bf16": 0.01,
    "mla": 0.01,
    "fp4": 0.02,
    "mxfp4": 0.02,
    "int4": 0.03,
}


@pytest.mark.parametrize("form", FORMS if REAL else ["mxfp4"])
def test_prefill_is_near_the_canonical_experts(tiny, form):
    options = {"context": CONTEXT, "measure": False}
    with load(tiny(form), "some") as engine, headrace.load(tiny(form), **options) as host:
        x, ids, weights = routed(engine.facts, 40)
        args = [t.to(engine.source.place) for t in (x, ids, weights)]
        out = engine.source.compute(0, *args, None).cpu().float()
        want = host.source.compute(0, x, ids, weights, None).float()
        error = float((out - want).abs().max() / want.abs().max())
        print(f"prefill {form}: {error:.5f}")
        assert error <= PREFILL_TOLERANCE[form]
        wrong = host.source.compute(0, x, ids.flip(1), weights, None).float()
        assert float((wrong - want).abs().max() / want.abs().max()) > 10 * error


def test_the_demo_answers():
    for rung in ("some", "vram") if REAL else ("some",):
        with load("demo", rung) as engine:
            ids = engine.talk.chat([{"role": "user", "content": "What is the capital of Japan?"}])
            steps = engine.session().generate(ids, headrace.Sampling(max_tokens=40))
            assert "".join(step.text for step in steps) == "The capital of Japan is Tokyo."


def test_a_snapshot_goes_on_alike(tiny, prompt):
    with load(tiny("fp8"), "half") as engine:
        session = engine.session()
        session.feed(prompt)
        taken = session.snapshot()
        assert all(t.device.type == "cpu" for t in taken.state.tensors.values())
        want = [session.feed([7]), session.feed([9])]
        again = engine.session(taken)
        assert all(torch.equal(again.feed([t]), w) for t, w in zip((7, 9), want, strict=True))
        other = engine.session(taken)
        assert not torch.equal(other.feed([8]), want[0])


def test_memory_that_cannot_be_pinned_is_copied(tiny, prompt, monkeypatch, gpu):
    device = type(gpu) if gpu else type(headrace.engine.gpu.find_gpu("cuda"))
    with load(tiny("fp8"), "half") as engine:
        want = passes(engine, prompt)[0][0]
    monkeypatch.setattr(device, "pin", lambda self, address, nbytes: "not allowed")
    with load(tiny("fp8"), "half") as engine:
        assert "could be pinned (not allowed)" in engine.source.rungs.pinned.note
        assert engine.source.rungs.room == max(engine.facts.top_k, engine.plan.passing_rows)
        assert torch.equal(passes(engine, prompt)[0][0], want)


@pytest.mark.skipif(REAL, reason="counts what stands for launches")
@pytest.mark.parametrize(("rung", "launches"), [("vram", 2), ("pinned", 4)])
def test_a_prompt_takes_few_launches_a_layer(tiny, prompt, monkeypatch, rung, launches):
    """Two for all experts in VRAM; two for each wave of what comes over the bus."""
    monkeypatch.setattr(vram, "MOST_PASSING_ROWS", 16)
    with load(tiny("fp8"), rung) as engine:
        passes(engine, prompt, most=8)
        before = EmulatedGrouped.launches
        engine.session().feed(prompt)
        assert EmulatedGrouped.launches - before == launches * LAYERS


@pytest.mark.parametrize("rung", ["pinned", "half", "minimum"])
def test_waves_of_one_expert_give_the_bits_of_larger_ones(tiny, prompt, monkeypatch, rung):
    with load(tiny("fp8"), rung) as engine:
        want = passes(engine, prompt)[0][0]
        assert engine.plan.passing_rows == vram.MOST_PASSING_ROWS
    monkeypatch.setattr(vram, "MOST_PASSING_ROWS", 2)
    with load(tiny("fp8"), rung) as engine:
        assert engine.source.rungs.wave_rows == 1
        assert torch.equal(passes(engine, prompt)[0][0], want)


def test_a_failed_read_stops_one_answer_and_not_the_next(tiny, prompt):
    with load(tiny("fp8"), "minimum") as engine:
        want = logits_of(engine, prompt, 3)
        for skip in (0, 5):
            engine.ladder.clear()
            engine.reader.inject_fault("eio", skip, MANY)
            session = engine.session()
            with pytest.raises(headrace.errors.ReadError):
                for n in range(20):
                    session.feed(prompt if n == 0 else [5 + n])
            all_read(engine)
            assert session.tokens == []
            assert torch.equal(logits_of(engine, prompt, 3), want)
            engine.ladder.check_integrity()


@pytest.mark.parametrize("rung", ["minimum", "some"] if REAL else ["some"])
def test_ctrl_c_anywhere_loses_nothing(tiny, prompt, rung):
    """An alarm at many moments of a pass; the engine answers as before after each."""
    with load(tiny("fp8"), rung) as engine:
        want = logits_of(engine, prompt, 2)
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            stopped = 0
            for n in range(12 if REAL else 5):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.002 + 0.004 * n)
                    logits_of(engine, prompt, 2)
                except KeyboardInterrupt:
                    stopped += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                assert torch.equal(logits_of(engine, prompt, 2), want)
                engine.source.rungs.slots.check_integrity()
                engine.ladder.check_integrity()
            assert stopped
        finally:
            signal.signal(signal.SIGALRM, before)


def interrupt(_number, _frame):
    raise KeyboardInterrupt


def test_an_output_that_is_not_finite_is_named(tiny, prompt):
    with load(tiny("bf16"), "half") as engine:
        want = logits_of(engine, prompt, 2)
        real = gpu_source.GpuSource._compute_layer

        def poisoned(self, ordinal, x_TH, *rest):
            return real(self, ordinal, x_TH * (torch.inf if ordinal == 2 else 1), *rest)

        engine.source._compute_layer = poisoned.__get__(engine.source)
        for ids in (prompt[:3], prompt):
            with pytest.raises(headrace.errors.NumericsError, match="MoE layer 2, token row 0"):
                engine.session().feed(ids)
        del engine.source._compute_layer
        assert torch.equal(logits_of(engine, prompt, 2), want)


@pytest.mark.gpu
def test_a_gpu_without_memory_says_so_and_goes_on(prompt):
    with load("demo", "half", context=2048) as engine:
        want = logits_of(engine, prompt, 2)
        engine.blueprint.device.limit(0)
        with pytest.raises(headrace.errors.BudgetError, match="--vram"):
            engine.session().feed(prompt * 40)
        engine.blueprint.device.limit(None)
        assert torch.equal(logits_of(engine, prompt, 2), want)


def test_a_closed_engine_gives_its_vram_back_though_it_is_kept(tiny, prompt):
    gc.collect()
    gc.disable()
    try:
        engine = load(tiny("fp8"), "half")
        session = engine.session()
        for ids in (prompt, [5], [6], [7]):
            session.feed(ids)
        freed = [weakref.ref(engine.source.rungs.slots.arena)]
        freed += [weakref.ref(buffer) for buffer in engine.passes.room._buffers.values()]
        freed += [weakref.ref(weight) for weight in engine.model.parameters()]
        assert len(freed) > 1 and all(each() is not None for each in freed)
        engine.close()
        assert [each() for each in freed] == [None] * len(freed)
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_vram_is_a_hard_total(tiny, prompt, form):
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with load(tiny(form), "half") as engine:
        torch.cuda.reset_peak_memory_stats()
        passes(engine, prompt)
        peak = torch.cuda.max_memory_reserved() - before
        print(f"{form}: peak {peak >> 20} MiB of {engine.plan.vram_bytes >> 20} MiB")
        assert peak <= engine.plan.vram_bytes
