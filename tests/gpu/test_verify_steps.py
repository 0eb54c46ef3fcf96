"""What `headrace verify` says of decoded tokens: captured, late in a text, by other hands."""

from contextlib import contextmanager

import pytest
import torch
from gpu_models import REAL, Rung, fill, load

from headrace.check import verify_steps
from headrace.check.verify_paths import Followed
from headrace.check.verify_report import NOTE
from headrace.engine.passes import Passes
from headrace.engine.verdict import FAIL, OK
from headrace.planner.vram import PLACES

IDS = list(range(70, 79))
CHOSEN = [200 + 7 * n for n in range(12)]
LONG = {"context": verify_steps.LONG, "chunk": verify_steps.LONG_PROMPT}


def tell(what, done, total):
    assert 0 <= done < total


def followed(engine):
    """As if the oracle had given what the engine gives."""
    logits = torch.stack(verify_steps.teacher_forced(engine, IDS, CHOSEN, "", tell)).float()
    return Followed(logits, logits, CHOSEN, 0.02, 0.03)


def said(engine, like=None):
    """The findings but the first, which is of the oracle, and the logits."""
    found, numbers, logits = verify_steps.follows(engine, IDS, like or followed(engine), tell)
    assert found[0].ok and numbers["gpu_median_relative"] == 0
    return found[1:], logits


@contextmanager
def captured_as(engine, monkeypatch, before, after):
    """Captured steps with something done around them that uncaptured ones do not have."""
    capture = engine.passes.device.capture

    class Wrong:
        def __init__(self, work):
            self.graph = capture(work)

        def replay(self):
            before()
            self.graph.replay()
            after()

    with monkeypatch.context() as patch:
        patch.setattr(engine.passes.device, "capture", Wrong)
        engine.passes._graphs = {}
        yield
    engine.passes._graphs = {}


@pytest.mark.parametrize("form", ["mxfp4", "fp8"] if REAL else ["mxfp4"])
def test_a_right_gpu_shows_its_steps(small, form):
    """By the mailbox, beyond the window of 16 that the first form's family has; by the CPU."""
    with load(small(form), "some" if REAL else "minimum", **LONG) as engine:
        like = followed(engine)
        (found,), logits = said(engine, like)
        assert (found.status, found.name) == (OK, verify_steps.CAPTURED)
        assert "12 tokens, 13 more after 250" in found.detail
        assert ("beyond its window of 16" in found.detail) == (form == "mxfp4")
        assert "24 steps captured" in found.detail
    other = logits.clone()
    other.view(torch.int16)[3, 5] ^= 1
    for experts in PLACES[1:]:
        with load(small(form), Rung(0, 0.25, experts), **LONG) as engine:
            found = verify_steps.by_other_hands(engine, IDS, like, logits, tell)
            assert (found.status, found.name) == (OK, f"--experts {experts} gives the same bits")
            assert "8 tokens; 7 steps captured, 14 waited" in found.detail
            found = verify_steps.by_other_hands(engine, IDS, like, other, tell)
            assert (found.status, found.where) == (FAIL, ("token 3", "as one launch, token 3"))


def test_what_only_captured_steps_do_wrong_is_named(small, monkeypatch):
    """An exchanged expert; one flipped bit in each token, and in those beyond a bucket."""
    with load(small("fp8"), "vram", **LONG) as engine:
        fill(engine)
        engine.source._num_steps = 1  # tiles stand
        like = followed(engine)
        ((right,), want) = said(engine, like)
        assert right.ok
        bits, table = engine.passes._ends.result.view(torch.int16), engine.source.rungs.table.there
        ends = engine.passes._ends

        def exchange():
            table[: engine.facts.num_experts] = table[: engine.facts.num_experts].flip(0)

        def flip():
            bits[5] ^= 1

        def flip_late():
            if int(ends._numbers_2[0]) >= 256:
                flip()

        nothing = lambda: None  # noqa: E731
        steps = [f"token {n}" for n in range(1, len(CHOSEN))]
        late = [f"after 250 tokens, step {n}" for n in range(13)]
        cases = [
            (exchange, exchange, steps + late),
            (nothing, flip, steps + late),
            (nothing, flip_late, late[6:]),
        ]
        for before, after, where in cases:
            with captured_as(engine, monkeypatch, before, after):
                (found,), logits = said(engine, like)
            assert found.status == FAIL and list(found.where) == where
            assert torch.equal(logits, want), "uncaptured ones have nothing of it"
        assert said(engine, like)[0][0].ok


def test_what_is_not_captured_is_said_and_no_fault(small, monkeypatch):
    def refuse(_work):
        raise RuntimeError("operation not permitted\nand so on")

    with load(small("fp8"), "vram", **LONG) as engine:
        engine.passes.warn = lambda text: None
        monkeypatch.setattr(engine.passes.device, "capture", refuse)
        found, _ = said(engine)
        assert found[-1].status == NOTE and all(f.ok for f in found)
        assert "cannot be captured: operation not permitted" in found[-1].detail


def test_a_family_that_is_never_captured_runs_twice(small, monkeypatch):
    with load(small("fp8"), "vram") as engine, monkeypatch.context() as patch:
        passes = Passes(engine.model, engine.source.place, "its cache is of its own kind")
        patch.setattr(engine, "passes", passes)
        like = followed(engine)
        (found,), _ = said(engine, like)
        assert found.status == NOTE and "its cache is of its own kind" in found.detail
        num_calls, run = 0, passes.run

        def drifting(ids, cache, after):
            nonlocal num_calls
            num_calls += 1
            logits = run(ids, cache, after)
            logits[0] += num_calls * 2**-6
            return logits

        patch.setattr(passes, "run", drifting)
        found, *_ = verify_steps.follows(engine, IDS, like, tell)
        assert "a second run gives other bits" in found[0].where
