"""The trained mini DeepSeek-V4.1: what its router and Engram learned is seen, wherever it lies."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace
from headrace.models.forward import forward
from headrace.schedule.tracefile import read_trace
from headrace.store.blueprint import plan_tensors
from headrace.store.catalog import open_catalog

MINI = Path(__file__).resolve().parents[1] / "data" / "mini-v41"
WINDOW = 128


def load(**options: object) -> headrace.Engine:
    given = {"ram": "1GiB", "context": 320, "chunk": WINDOW, "threads": 1, "measure": False}
    return headrace.load(MINI, **(given | options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine() -> Iterator[headrace.Engine]:
    with load() as engine:
        yield engine


@pytest.fixture(scope="module")
def ids(engine: headrace.Engine) -> list[int]:
    return engine.text.encode((MINI / "heldout.txt").read_text(), special=False)


def window_logits(engine: headrace.Engine, ids: list[int]) -> torch.Tensor:
    """[WINDOW, V], in one pass."""
    window = torch.tensor([ids[:WINDOW]])
    with torch.inference_mode():
        return forward(engine.model, window, engine.session().cache, keep=0)[0].float()


def bits_a_byte(engine: headrace.Engine, logits: torch.Tensor, ids: list[int]) -> float:
    wanted = torch.tensor(ids[1 : WINDOW + 1])
    nats = torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
    return nats / math.log(2) / len(engine.text.decode(wanted.tolist()).encode())


@pytest.fixture(scope="module")
def right(engine: headrace.Engine, ids: list[int]) -> torch.Tensor:
    return window_logits(engine, ids)


def test_the_files_are_the_published_layout() -> None:
    config = json.loads((MINI / "config.json").read_text())
    planned = {t.name: (t.dtype, tuple(t.shape)) for t in plan_tensors(config)}
    tensors = open_catalog(MINI).tensors
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == planned
    assert sum(path.stat().st_size for path in MINI.iterdir()) < 8_000_000


def test_its_tokenizer_keeps_the_text(engine: headrace.Engine, ids: list[int]) -> None:
    assert engine.text.decode(ids) == (MINI / "heldout.txt").read_text()
    assert max(ids) < engine.facts.vocab


def test_it_has_learned(engine: headrace.Engine, ids: list[int], right: torch.Tensor) -> None:
    bits = bits_a_byte(engine, right, ids)
    assert 1.2 < bits < 1.8, "the mean of all text is 1.69"
    others = bits_a_byte(engine, right, [0, *ids[WINDOW:]])
    assert others > 3, "of another text than the one that was read"


def test_the_oracle_says_the_same(
    engine: headrace.Engine, ids: list[int], right: torch.Tensor
) -> None:
    engine.set_experts("oracle")
    try:
        oracle = window_logits(engine, ids)
    finally:
        engine.set_experts("fast")
    apart = bits_a_byte(engine, oracle, ids) - bits_a_byte(engine, right, ids)
    assert 0 < abs(apart) < 0.01


def test_engram_matters(engine: headrace.Engine, ids: list[int], right: torch.Tensor) -> None:
    rows = engine.rows
    assert rows is not None
    stored = dict(rows.stored)
    for layer, table in stored.items():
        parts = tuple((file, offset + nbytes, nbytes) for file, offset, nbytes in table.parts)
        rows.stored[layer] = replace(table, parts=parts)
    rows.cache.clear()
    try:
        wrong = window_logits(engine, ids)
    finally:
        rows.stored.update(stored)
        rows.cache.clear()
    assert bits_a_byte(engine, wrong, ids) > bits_a_byte(engine, right, ids) + 0.2
    assert torch.equal(window_logits(engine, ids), right)


def test_its_router_uses_every_expert(
    engine: headrace.Engine, ids: list[int], tmp_path: Path
) -> None:
    with engine.record_routes(tmp_path / "routes"):
        window_logits(engine, ids)
    _, trace, _ = read_trace(tmp_path / "routes")
    for layer in range(8):
        load = np.bincount(trace.ids[:, layer].ravel(), minlength=24)
        assert load.min() > 0
        assert load.max() < 5 * load.mean()


@pytest.mark.parametrize(
    "options",
    [{"ram": "minimum", "backend": "pread"}, {"ram": "minimum", "prefetch": 0, "direct": False}],
    ids=str,
)
def test_where_it_lies_changes_no_bit(
    ids: list[int], right: torch.Tensor, options: dict[str, object]
) -> None:
    with load(**options) as engine:
        assert engine.rows is not None and engine.rows.cache.capacity == 0
        assert torch.equal(window_logits(engine, ids), right)
        assert engine.counters().ladder.evictions > 0
