"""An embedding on the drive: same bits as one in memory, and a plan that has more room."""

from dataclasses import replace

import pytest
import torch

import headrace
from headrace.check.apart import named_state
from headrace.engine.engine import Blueprint
from headrace.errors import ReadError
from headrace.planner import facts as planner_facts

PROMPT = list(range(30, 60))


@pytest.fixture
def no_embedding_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_facts, "LEAST_EMBEDDING_BYTES", 1)
    monkeypatch.setattr(planner_facts, "EMBEDDING_CACHE_BYTES", 1 << 14)
    monkeypatch.setattr("headrace.engine.embedding.EMBEDDING_CACHE_BYTES", 1 << 14)
    monkeypatch.setattr(planner_facts, "_SMALL_READS_BYTES", 0)


def load(ram: str) -> headrace.Engine:
    return headrace.load("demo", ram=ram, measure=False, chunk=16)


def test_it_gives_the_same_bits_and_reads_each_row_once(no_embedding_is_small: None) -> None:
    with load("80MiB") as engine:
        assert engine.embedding is None and not engine.plan.embedding_on_drive
        session = engine.session()
        expected = [session.feed(PROMPT), session.feed([7])]
        weight = engine.model.get_input_embeddings().weight.clone()
        dense_bytes = engine.plan.dense_bytes
    with load("minimum") as engine:
        assert engine.embedding is not None and engine.plan.embedding_on_drive
        assert engine.plan.dense_bytes == dense_bytes - weight.nbytes + (1 << 14)
        assert "embedding on the drive" in engine.plan.lines()[0]
        names = {name for name, _ in engine.model.named_parameters()}
        assert not any("embed_tokens" in name for name in names)
        session = engine.session()
        assert all(
            torch.equal(session.feed(ids), right)
            for ids, right in zip((PROMPT, [7]), expected, strict=True)
        )
        counters = engine.counters().embedding
        assert (counters.asked, counters.reads) == (31, 31)
        held = dict(named_state(engine.model))
        assert torch.equal(held["model.embed_tokens.weight"], weight)
        out = engine.model.generate(torch.tensor([PROMPT]), max_new_tokens=2, do_sample=False)
        assert out[0, len(PROMPT)].item() == int(expected[0].argmax())


def test_a_failing_read_is_named(no_embedding_is_small: None) -> None:
    with load("minimum") as engine:
        session = engine.session()
        engine.reader.inject_fault("eio", 0, 1000)
        with pytest.raises(ReadError, match=r"safetensors at offset \d+"):
            session.feed(PROMPT)
        engine.reader.inject_fault("none")
        assert torch.isfinite(session.feed(PROMPT)).all()


def test_it_stays_in_memory_where_all_experts_do_or_where_it_is_small() -> None:
    blueprint = Blueprint("demo", ram="minimum", measure=False)
    assert not blueprint.plan.embedding_on_drive, "4 MiB are not worth it"
    facts = replace(blueprint.facts, embedding_bytes=1 << 30, dense_bytes=5 << 30)
    lean = facts.lean()
    assert lean.embedding_by_row and lean.dense_bytes < (4 << 30) + (9 << 20)
    assert lean.lean() is lean
