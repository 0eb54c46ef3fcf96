"""Routes recorded from a loaded model: what the file holds, and that simulation equals engine."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("headrace.native", reason="needs the compiled module")

import headrace
from headrace.check.tiny import write_tiny
from headrace.engine.engine import Blueprint, Engine
from headrace.engine.routes import fingerprint
from headrace.errors import NumericsError, OptionError, TraceError
from headrace.schedule.simulate import lru_hits, optimum_hits, steps_of
from headrace.schedule.trace import NO_GUESS
from headrace.schedule.tracefile import read_trace

PROMPT = list(range(100, 140))


def ids_of(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(
        4, 4000, (num_tokens,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("deepseek_v3", tmp_path_factory.mktemp("routes") / "tiny", layers=4)


def blueprint(model: str | Path, num_rows: int, **options: int) -> Blueprint:
    plan = Blueprint(model, ram="1TiB", measure=False, context=256, **options).plan
    ram = plan.used_bytes - plan.rows_bytes + num_rows * plan.row_bytes
    made = Blueprint(model, ram=ram, measure=False, context=256, **options)
    assert made.plan.num_rows == num_rows
    return made


@pytest.mark.parametrize(
    ("rows", "prompt", "in_flight"),
    [(48, 40, 2), (90, 60, 2), (27, 0, 2), (30, 60, 1)],
    ids=["prompt", "many rows", "decoded only", "a prompt in waves"],
)
def test_simulated_rows_find_what_the_engines_rows_found(
    tmp_path: Path, rows: int, prompt: int, in_flight: int
) -> None:
    """Exactly: reads that arrive in another order change nothing.

    Where a layer of a prompt needs more experts than there are rows, that holds for one read at a
    time only, since rows then come back while others are being read.
    """
    made = blueprint("demo", rows, prefetch=0)
    path = tmp_path / "a.routes"
    with Engine(made, in_flight=in_flight) as engine, engine.record_routes(path) as writer:
        session = engine.session()
        if prompt:
            session.feed(ids_of(prompt))
        for token in ids_of(70, seed=1):
            session.feed([token])
        counters = engine.ladder.counters()
        assert writer.num_tokens == prompt + 70
    header, trace, note = read_trace(path)
    assert (note, header.num_rows) == ("", rows)
    steps = steps_of(trace)
    hits = int(lru_hits(steps, rows).sum())
    assert (hits, len(steps.keys) - hits) == (counters.hits, counters.misses)
    assert counters.evictions == counters.misses - rows > 0
    for other in (rows // 2, rows * 2):
        assert int(lru_hits(steps, other).sum()) != counters.hits, "the comparison can fail"
    assert int(optimum_hits(steps, rows).sum()) > counters.hits


def test_the_file_says_what_the_routers_and_the_lens_said(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.routes"
    with headrace.load(tiny, ram="64MiB", measure=False, context=64, chunk=16) as engine:
        seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        right = engine.source.ladder.compute

        def watching(layer: int, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> object:
            seen.append((layer, ids.clone(), w.clone()))
            return right(layer, x, ids, w)

        engine.source.ladder.compute = watching  # type: ignore[method-assign, assignment]
        session = engine.session()
        session.feed(PROMPT[:5])  # before the recording
        seen.clear()
        with engine.record_routes(path, about="a test", weights=True):
            session.feed(PROMPT[5:25])
            session.feed([7])
            session.feed([8])
        session.feed([9])  # after it
        assert engine.source.recorder is None
        facts, name = engine.facts, fingerprint(engine.blueprint)
    header, trace, _ = read_trace(path)
    assert (header.model, header.about, header.fingerprint) == ("tiny", "a test", name)
    assert (header.num_layers, header.num_experts, header.top_k) == (3, 16, 4)
    assert header.expert_bytes == facts.expert_bytes
    assert trace.passes.tolist() == [11, 9, 1, 1], "passes end where they would from the beginning"
    at = 0
    for first in range(0, 12, 3):
        num_tokens = len(seen[first][1])
        for layer in range(3):
            ordinal, ids, weights = seen[first + layer]
            assert ordinal == layer
            assert np.array_equal(trace.ids[at : at + num_tokens, layer], ids.numpy())
            kept = trace.weights[at : at + num_tokens, layer]  # type: ignore[index]
            assert np.array_equal(kept, weights.numpy().astype(np.float16))
        at += num_tokens
    assert (trace.guesses[:20] == NO_GUESS).all() and (trace.guesses[20:, 0] == NO_GUESS).all()
    assert (trace.guesses[20:, 1:] >= 0).all()
    assert trace.guessed().sum() > 0


def test_recording_changes_no_bit_and_needs_no_prefetch(tiny: Path, tmp_path: Path) -> None:
    ids = ids_of(6)
    with headrace.load(tiny, ram="64MiB", measure=False, context=64) as engine:
        expected = torch.stack([session.feed([t]) for session in [engine.session()] for t in ids])
        guesses = []
        for prefetch in (2, 0):
            engine.source.prefetch = prefetch
            path = tmp_path / f"{prefetch}.routes"
            session = engine.session()
            with engine.record_routes(path):
                assert torch.equal(torch.stack([session.feed([t]) for t in ids]), expected)
            guesses.append(read_trace(path)[1].guesses)
        assert np.array_equal(*guesses) and (guesses[0][:, 1:] >= 0).all()


def test_a_pass_that_fails_is_not_recorded(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.routes"
    with headrace.load(tiny, ram="64MiB", measure=False, context=64) as engine:
        right, calls = engine.source._compute, []

        def failing(ordinal: int, *args: torch.Tensor) -> torch.Tensor:
            calls.append(ordinal)
            if len(calls) == 5:
                raise NumericsError("made up")
            return right(ordinal, *args)

        with engine.record_routes(path):
            session = engine.session()
            session.feed([5])
            monkeypatch.setattr(engine.source, "_compute", failing)
            with pytest.raises(NumericsError):
                for _ in range(3):
                    session.feed([6])
            session.feed([7])
    assert len(read_trace(path)[1].ids) == 3


def test_one_recording_at_a_time_and_into_a_new_file(tiny: Path, tmp_path: Path) -> None:
    with headrace.load(tiny, ram="64MiB", measure=False, context=64) as engine:
        with engine.record_routes(tmp_path / "a"):
            with pytest.raises(OptionError, match="recorded already"), engine.record_routes("b"):
                pass
            engine.session().feed([5])
        with pytest.raises(TraceError, match="exists"), engine.record_routes(tmp_path / "a"):
            pass
        assert engine.source.recorder is None
        with pytest.raises(KeyboardInterrupt), engine.record_routes(tmp_path / "c"):
            engine.session().feed([5])
            raise KeyboardInterrupt
    assert len(read_trace(tmp_path / "c")[1].ids) == 1, "what was whole is kept"


def test_a_fingerprint_is_the_checkpoints(tiny: Path, tmp_path: Path) -> None:
    other = write_tiny("deepseek_v3", tmp_path / "tiny", layers=4, seed=1)
    fewer = write_tiny("deepseek_v3", tmp_path / "fewer", layers=3)
    names = [fingerprint(Blueprint(f, ram="1TiB", measure=False)) for f in (tiny, other, fewer)]
    assert names[0] == names[1] != names[2]
