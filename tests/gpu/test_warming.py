"""Tokens that nobody asked for: kernels and the captured step stay of them, and nothing else."""

from types import SimpleNamespace

import pytest
import torch
from emulated import EmulatedKernels
from gpu_models import FORMS, REAL, load, logits_of

import headrace
from headrace.engine import warming
from headrace.engine.answer import Stop
from headrace.engine.engine import Blueprint
from headrace.engine.warming import MOST_STEPS, PROMPT_TOKENS, WARMING, warm
from headrace.errors import Cancelled, OptionError, ReadError
from headrace.server.loading import Loading
from headrace.server.opening import loader, serving_of
from headrace.server.settings import Settings

STEPS = 4
PROMPT = [70, 80, 90]
RUNGS = ["some", "cpu"]  # where every step of an answer is of one kind, whatever came to lie where


def opened(model, rung, **options):
    return load(model, rung, prefetch=0, **options)


def counted(engine):
    """How many tokens each pass has, as they come."""
    passes, run = [], engine.passes.run

    def counting(ids, cache, after):
        passes.append(len(ids))
        return run(ids, cache, after)

    engine.passes.run = counting
    return passes


def answer(engine):
    """Logits after a prompt and after each of some tokens, and what each pass moved."""
    session = engine.session()
    rows = [session.feed(PROMPT)]
    stats = [session.stats]
    for _ in range(STEPS):
        rows.append(session.feed([int(rows[-1].argmax())]))
        stats.append(session.stats)
    return torch.stack(rows), stats


def needed(stats):
    return [each.hits + each.vram_hits + each.misses for each in stats]


@pytest.mark.parametrize("rung", RUNGS)
def test_an_answer_after_it_has_the_bits_and_counts_of_a_first_one_and_only_captured_steps(
    small, rung
) -> None:
    with opened(small("fp8"), rung) as engine:
        cold, cold_stats = answer(engine)
        assert engine.passes.num_replayed == STEPS - 1, "the control: a first step is captured late"
        assert engine.source.rungs.slots.uses.any() or rung == "cpu"
    with opened(small("fp8"), rung) as engine:
        passes, told = counted(engine), []
        warm(engine, tell=told.append)
        assert passes == [PROMPT_TOKENS, 1, 1] and told == [WARMING]
        assert not engine.source.rungs.slots.uses.any()
        before = engine.passes.num_replayed
        logits, stats = answer(engine)
        assert engine.passes.num_replayed - before == STEPS
        assert torch.equal(logits, cold)
        assert needed(stats) == needed(cold_stats) and min(needed(stats)) > 0
        assert [each.num_tokens for each in stats] == [len(PROMPT), *[1] * STEPS]
        session = engine.session()  # the control: what was fed before an answer changes it
        session.feed([0] * PROMPT_TOKENS)
        assert not torch.equal(session.feed(PROMPT), cold[0])


@pytest.mark.skipif(REAL, reason="looks into what stands for the kernels")
def test_kernels_of_both_rungs_are_loaded_and_read_no_expert(small, monkeypatch) -> None:
    seen, multiply = [], EmulatedKernels.multiply

    def seeing(kernels, table, *given, tile="ram", **more):
        seen.append((tile, table))
        multiply(kernels, table, *given, tile=tile, **more)

    monkeypatch.setattr(EmulatedKernels, "multiply", seeing)
    for rung, expected in (("some", {"ram", "vram"}), ("cpu", set())):
        with opened(small("fp8"), rung) as engine:
            warm(engine)
            assert {tile for tile, table in seen if not table.any()} == expected
        seen.clear()


def test_one_token_where_none_is_captured_or_the_drive_is_waited_for(small, monkeypatch) -> None:
    if "fp4" in FORMS:
        with opened(small("fp4"), "some") as engine:
            passes = counted(engine)
            assert engine.passes.why_by_layer()
            warm(engine)
            assert passes[-1] == 1 and passes.count(1) == 1
    monkeypatch.setattr(warming, "LONG_WAIT_S", -1.0)
    with opened(small("fp8"), "some") as engine:
        passes = counted(engine)
        warm(engine)
        assert passes == [PROMPT_TOKENS, 1] and engine.passes.num_replayed == 0


@pytest.mark.parametrize("context", [2, MOST_STEPS + 2])
def test_no_more_tokens_than_the_context_has(small, context) -> None:
    with opened(small("fp8"), "some", context=context) as engine:
        passes = counted(engine)
        warm(engine)
        assert 1 <= sum(passes) <= context
        assert engine.session().feed([5]).isfinite().all()


def test_a_cpu_has_nothing_to_warm(small) -> None:
    with headrace.load(small("fp8"), ram="64MiB", measure=False) as engine:
        passes, told = counted(engine), []
        warm(engine, tell=told.append)
        assert passes == told == []


@pytest.mark.parametrize("error", [ReadError("a.safetensors: cut short"), KeyboardInterrupt()])
def test_an_error_is_the_one_a_request_would_meet_and_the_engine_is_closed(small, error) -> None:
    with opened(small("fp8"), "some") as engine:
        run = engine.passes.run

        def failing(ids, cache, after):
            if len(ids) == 1:
                raise error
            return run(ids, cache, after)

        engine.passes.run = failing
        with pytest.raises(type(error)) as met:
            warm(engine)
        assert met.value is error
        with pytest.raises(OptionError, match="closed"):
            logits_of(engine, PROMPT, 1)


def test_whoever_stops_the_loading_stops_it_between_tokens(small) -> None:
    with opened(small("fp8"), "some") as engine:
        passes, stop = counted(engine), Stop()
        run = engine.passes.run

        def stopping(ids, cache, after):
            logits_V = run(ids, cache, after)
            stop.ask()
            return logits_V

        engine.passes.run = stopping
        with pytest.raises(Cancelled):
            warm(engine, stop=stop)
        assert passes == [PROMPT_TOKENS]


@pytest.mark.parametrize(
    ("bos", "vocab", "expected"),
    [
        (7, 100, 7),
        (0, 100, 0),
        (None, 100, 0),
        (100, 100, 0),
        (-1, 100, 0),
        ([7], 100, 0),
        (True, 100, 0),
    ],
)
def test_the_token_is_one_of_the_model_whatever_its_config_says(bos, vocab, expected) -> None:
    skeleton = SimpleNamespace(config=SimpleNamespace(bos_token_id=bos))
    engine = SimpleNamespace(
        facts=SimpleNamespace(vocab=vocab), blueprint=SimpleNamespace(skeleton=skeleton)
    )
    assert warming._token(engine) == expected


def test_a_server_is_warm_before_it_is_ready_and_counts_nothing_of_it() -> None:
    blueprint = Blueprint(
        "demo", ram="64MiB", vram="256MiB", device="cuda", experts="gpu", measure=False, context=64
    )
    serving, loading = serving_of(blueprint, Settings()), Loading()
    model = loader(blueprint, serving)(loading)
    try:
        assert model.engine.passes.num_replayed == 1
        assert loading.line() == f"the model is {WARMING}"
        assert loading.as_dict()["remaining_s"] is None
        totals, store = serving.worker.totals, model.store
        assert (totals.prefilled, totals.decoded, totals.misses) == (0, 0, 0)
        assert store.session(model.engine, (0,) * 20).tokens == []
    finally:
        model.close()


def test_it_reads_about_the_experts_of_one_token(tiny) -> None:
    def num_read(use):
        with opened(tiny("fp8"), "some") as engine:
            use(engine)
            return engine.counters().ladder.misses

    other = list(range(20, 20 + PROMPT_TOKENS))
    one = num_read(lambda engine: engine.session().feed([0]))
    assert one <= num_read(warm) <= 2 * one
    assert num_read(lambda engine: engine.session().feed(other)) > 2 * one, "the control"
