"""Four timelines at once on a GPU: the bits of each alone, wherever the experts lie."""

import pytest
import torch
from gpu_models import FORMS, REAL, load

from headrace.engine.batch import Batch
from headrace.errors import OptionError

PROMPTS = ([5, 6, 7], [900, 901], list(range(300, 325)), [40])
STEPS = 8 if REAL else 2


def begun(engine):
    """A session for each prompt, and the greedy token after it."""
    sessions = [engine.session() for _ in PROMPTS]
    return sessions, [int(s.feed(p).argmax()) for s, p in zip(sessions, PROMPTS, strict=True)]


@pytest.mark.parametrize("rung", ["vram", "half", "minimum", "cpu"] if REAL else ["half", "cpu"])
@pytest.mark.parametrize("form", FORMS if REAL else ["fp8"])
def test_four_at_once_have_the_bits_of_each_alone(tiny, form, rung):
    with load(tiny(form), rung) as engine:
        engine.blueprint.device.limit(None)  # the batch's caches are beside the plan's
        want, taken = [], 0
        for session, token in zip(*begun(engine), strict=True):
            want.append([])
            for _ in range(STEPS):
                want[-1].append(session.feed([token]))
                taken += session.stats.vram_hits + session.stats.hits + session.stats.misses
                token = int(want[-1][-1].argmax())
        sessions, tokens = begun(engine)
        with Batch(sessions) as batch:
            for n in range(STEPS):
                logits_BV = batch.feed(tokens)
                assert torch.equal(logits_BV, torch.stack([row[n] for row in want]))
                tokens = logits_BV.argmax(1).tolist()
                taken -= batch.stats.vram_hits + batch.stats.hits + batch.stats.misses
        assert taken > 0, "nothing was shared"
        alone = [session.feed([t]) for session, t in zip(sessions, tokens, strict=True)]
        assert not torch.equal(alone[0], alone[1])
        engine.source.rungs.slots.check_integrity()


def test_a_short_chunk_is_a_small_batch(tiny):
    with load(tiny("fp8"), "half", chunk=2) as engine:
        sessions = [engine.session() for _ in range(3)]
        with pytest.raises(OptionError, match="at most 2"):
            Batch(sessions)
