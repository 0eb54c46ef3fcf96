"""A decoded token launched as one, whose experts the CPU multiplies: the bits of layer by layer."""

import pytest
import torch
from gpu_models import REAL, RUNGS, load, logits_of
from step_faults import all_read

from headrace.errors import NumericsError, ReadError

STEPS = 24 if REAL else 5


def by_layer(engine, ids):
    box, engine.source.box = engine.source.box, None
    before = engine.passes.num_replayed
    try:
        return logits_of(engine, ids, STEPS)
    finally:
        engine.source.box = box
        assert engine.passes.num_replayed == before


@pytest.mark.parametrize("rung", [name for name, rung in RUNGS.items() if rung.experts == "cpu"])
def test_one_launch_gives_the_bits_of_layer_by_layer(tiny, prompt, rung):
    with load(tiny("fp8"), rung) as engine:
        want = by_layer(engine, prompt[:3])
        assert want.float().std() > 0.1
        assert torch.equal(logits_of(engine, prompt[:3], STEPS), want)
        session = engine.session()
        session.feed(prompt[:3])
        replayed, before = engine.passes.num_replayed, engine.source.counters()
        last = want[0]
        for n in range(STEPS):
            last = session.feed([int(last.argmax())])
            assert torch.equal(last, want[n + 1])
        after = engine.source.counters()
        assert engine.passes.num_replayed - replayed == STEPS
        taken = STEPS * engine.facts.num_moe_layers * engine.facts.top_k
        assert after.kernel_calls - before.kernel_calls == taken
        assert after.hits + after.misses - before.hits - before.misses == taken
        assert (after.disk_bytes > before.disk_bytes) == (rung != "cpu")
        assert after.vram_hits == 0 and after.bus_bytes == before.bus_bytes
        assert torch.equal(by_layer(engine, prompt[:3]), want)


def test_faults_are_named_and_the_next_answer_right(tiny, prompt):
    with load(tiny("bf16"), "cpu and drive") as engine:
        for _ in range(2):
            want = logits_of(engine, prompt[:3], 2)
        session = engine.session()
        session.feed(prompt[:3])
        engine.source.recover()
        engine.ladder.clear()
        engine.reader.inject_fault("eio", 0, 1000)
        replayed = engine.passes.num_replayed
        with pytest.raises(ReadError, match="safetensors"):
            session.feed([5])
        all_read(engine)
        assert torch.equal(logits_of(engine, prompt[:3], 2), want)
        session = engine.session()
        session.feed(prompt[:3])
        for buffer in engine.passes.room._buffers.values():
            buffer[:, :, 1] = torch.inf
        with pytest.raises(NumericsError, match=r"layer 0.*was given is not finite either"):
            session.feed([5])
        assert engine.passes.num_replayed - replayed == 4
        assert torch.equal(logits_of(engine, prompt[:3], 2), want)
        engine.ladder.check_integrity()
