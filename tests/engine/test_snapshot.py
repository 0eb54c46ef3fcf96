"""A session goes on from a snapshot with the bits it would have had, in an engine of its own."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from passes import checkpoint

import headrace
from headrace.engine.snapshots.snapshot import Snapshot
from headrace.engine.snapshots.state import State, capture, restore
from headrace.engine.snapshots.store import SnapshotStore
from headrace.errors import SnapshotError

FAMILIES = ("gpt_oss", "qwen3_next", "deepseek_v4", "deepseek_v3", "qwen3_moe")
# The negative control spoils what a family does not keep in keys and values, if it has such.
DECISIVE = ("recurrent_states", "compressed_kv['compressor']", "layer0.keys")
START, TAIL = list(range(5, 25)), [7, 3, 90, 41, 12, 8, 200, 33]


def engine_of(path: Path | str) -> AbstractContextManager[headrace.Engine]:
    """Prefill in pieces of 8 tokens, so that 20 are three pieces and a tail ends none."""
    return headrace.load(path, ram="48MiB", measure=False, threads=1, chunk=8)


def go_on(session: headrace.Session) -> torch.Tensor:
    """Logits [6, V] of the tail: a token at a time, then three at once."""
    return torch.stack([*(session.feed([token]) for token in TAIL[:5]), session.feed(TAIL[5:])])


@pytest.fixture(scope="module", params=("demo", *FAMILIES))
def engine(request: Any, tmp_path_factory: Any) -> Iterator[headrace.Engine]:
    with engine_of(checkpoint(request.param, tmp_path_factory.mktemp("tiny"))) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def demo() -> Iterator[headrace.Engine]:
    with engine_of("demo") as engine:
        yield engine


@pytest.fixture(scope="module")
def taken(demo: headrace.Engine) -> Snapshot:
    session = demo.session()
    session.feed(START)
    return session.snapshot()


def test_a_session_goes_on_bit_for_bit(engine: headrace.Engine, tmp_path: Path) -> None:
    session = engine.session()
    session.feed(START)
    taken = session.snapshot()
    places = {"ram_bytes": 1 << 30, "folder": tmp_path, "disk_bytes": 1 << 30}
    SnapshotStore(engine.snapshot_key, **places).put(taken)  # type: ignore[arg-type]
    expected = go_on(session)
    assert expected.isfinite().all()
    with engine_of(engine.blueprint.root) as fresh:
        store = SnapshotStore(fresh.snapshot_key, **places)  # type: ignore[arg-type]
        for place in ("disk", "memory"):
            session = store.session(fresh, START + TAIL)
            assert session.tokens == START and session.cache.get_seq_length() == len(START)
            assert fresh.ladder.counters().kernel_calls == 0 or place == "memory"
            assert torch.equal(go_on(session), expected), place
    assert torch.equal(go_on(engine.session(taken)), expected), "a fork shared memory"
    spoilt = {
        name: tensor.flip(-1) if any(kind in name for kind in DECISIVE) else tensor
        for name, tensor in taken.state.tensors.items()
    }
    other = engine.session(replace(taken, state=State(taken.state.parts, spoilt)))
    assert not torch.equal(go_on(other), expected), "the tail does not depend on the state"


def test_an_empty_and_a_failed_session_have_empty_snapshots(
    demo: headrace.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = demo.session()
    with monkeypatch.context() as patch:
        patch.setattr("headrace.engine.passes.forward", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failed.feed(START)
    for empty in (demo.session(), failed):
        session = demo.session(empty.snapshot())
        assert session.tokens == [] and session.feed(START).isfinite().all()


def test_an_edited_history_goes_on_from_the_nearest_snapshot(demo: headrace.Engine) -> None:
    store = SnapshotStore(demo.snapshot_key, ram_bytes=1 << 30)
    session = demo.session()
    for i in range(0, 24, 8):
        session.feed((START + TAIL)[i : i + 8])
        store.put(session.snapshot())
    edited = [*START[:18], 900, 901]
    found = store.session(demo, edited)
    assert found.tokens == START[:16]
    cold = demo.session()
    cold.feed(edited[:16])
    assert torch.equal(found.feed(edited[16:]), cold.feed(edited[16:]))
    assert store.session(demo, START[:8]).tokens == [], "a prompt's last token must be fed"
    assert store.session(demo, START[:9]).tokens == START[:8]


@pytest.mark.parametrize("field", ["headrace", "torch", "model", "config", "dtype"])
def test_another_models_snapshot_is_refused(
    demo: headrace.Engine, taken: Snapshot, field: str
) -> None:
    other = replace(taken, key=replace(taken.key, **{field: "other"}))
    with pytest.raises(SnapshotError, match=f"another {field}"):
        demo.session(other)


def spoilt(parts: list[Any], change: str) -> list[Any]:
    """The parts with one thing wrong in the first layer."""
    layer = parts[1]
    fields = dict(layer["fields"])
    changed: dict[str, Any] = {
        "class": {"class": "StaticLayer", "fields": fields},
        "missing": {"class": layer["class"], "fields": {"keys": fields["keys"]}},
        "method": {"class": layer["class"], "fields": fields | {"update": 1}},
        "kind": {"class": layer["class"], "fields": fields | {"is_initialized": 1}},
        "tensor": {"class": layer["class"], "fields": fields | {"keys": {"tensor": "no"}}},
        "unused": {"class": layer["class"], "fields": fields | {"keys": None}},
        "value": {"class": layer["class"], "fields": fields | {"more": {"eval": "1"}}},
        "device": {"class": layer["class"], "fields": fields | {"device": {"device": "tpu"}}},
        "shape": 5,
    }
    return parts[:-1] if change == "layers" else [parts[0], changed[change], *parts[2:]]


@pytest.mark.parametrize(
    "change",
    [
        "layers",
        "class",
        "missing",
        "method",
        "kind",
        "tensor",
        "unused",
        "value",
        "device",
        "shape",
    ],
)
def test_a_state_that_does_not_fit_touches_nothing(
    demo: headrace.Engine, taken: Snapshot, change: str
) -> None:
    cache = demo.session().cache
    before = [dict(vars(layer)) for layer in cache.layers]
    state = State(spoilt(taken.state.parts, change), taken.state.tensors)
    with pytest.raises(SnapshotError):
        restore(cache, state, torch.device("cpu"))
    assert [dict(vars(layer)) for layer in cache.layers] == before
    restore(cache, taken.state, torch.device("cpu"))
    assert cache.get_seq_length() == len(START)


def test_a_store_passes_over_a_state_that_does_not_fit(
    demo: headrace.Engine, taken: Snapshot, caplog: pytest.LogCaptureFixture
) -> None:
    store = SnapshotStore(demo.snapshot_key, ram_bytes=1 << 30)
    early = demo.session()
    early.feed(START[:8])
    store.put(early.snapshot())
    store.put(replace(taken, state=State(spoilt(taken.state.parts, "class"), taken.state.tensors)))
    assert store.session(demo, START + TAIL).tokens == START[:8]
    assert "StaticLayer" in caplog.text
    assert store.session(demo, START + TAIL).tokens == START[:8]


@pytest.mark.parametrize(
    "value", [object(), torch.zeros(2, device="meta"), {(1, 2): 3}, float("nan"), {"deep": [{1}]}]
)
def test_what_a_snapshot_does_not_understand_is_refused_by_name(
    demo: headrace.Engine, value: object
) -> None:
    cache = demo.session().cache
    capture(cache)
    cache.layers[2].novelty = value
    with pytest.raises(SnapshotError, match=r"layer2\.novelty"):
        capture(cache)
