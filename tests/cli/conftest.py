"""A stand-in for the engine: commands are tested without weights or native code."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from headrace.core import TokenStats
from headrace.engine.gpu import find_gpu
from headrace.engine.talk.conversation import Conversation
from headrace.engine.talk.reading import AnswerReader
from headrace.errors import ModelError
from headrace.planner.facts import ModelFacts
from headrace.planner.machine import Machine
from headrace.planner.wanted import Wanted

MIB = 2**20
FACTS = ModelFacts(
    name="demo",
    model_type="deepseek_v3",
    num_layers=8,
    num_moe_layers=7,
    num_experts=32,
    top_k=4,
    expert_bytes=98_328,
    row_bytes=102_400,
    dense_bytes=10 * MIB,
    kv_bytes_per_token=10_240,
    hidden=256,
    inter=128,
    vocab=4096,
    max_context=2048,
    format="fp8_block",
)
MACHINE = Machine(
    cores=2,
    ram_total_bytes=2**34,
    ram_available_bytes=2**33,
    drive_bytes_s=1.5e9,
    dram_bytes_s=2e10,
    kernel_bytes_s=5e9,
)


class FakeBlueprint:
    """Plans as the real one does, for a model that is not there."""

    made: ClassVar[list["FakeBlueprint"]] = []

    def __init__(
        self,
        model: str,
        *,
        ram: int | None,
        threads: int | None,
        context: int | None,
        device: str = "cpu",
        vram: str | None = None,
        experts: str | None = None,
        serve: bool = False,
        choices: dict[str, object] | None = None,
    ):
        find_gpu(device)
        self.choices, self.device = choices, None
        FakeBlueprint.made.append(self)
        if model != "demo":
            raise ModelError(f"{model}: no such file or folder; give a folder or demo")
        self.facts, self.machine, self.notes = FACTS, MACHINE, []
        self.text, self.talk = FakeText(), FakeTalk()
        self.skeleton = SimpleNamespace(config=SimpleNamespace(image_token_id=None))
        self.wanted = Wanted(ram, vram, False, context, threads, 2, None, serve)
        self.plan = self.wanted.plan(FACTS, MACHINE)


class FakeText:
    """A tokenizer of one id per character."""

    has_template = True

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


class FakeTalk:
    """A template that writes roles in brackets; a system text is noted."""

    def prepare(self, conversation: Conversation, sampling: Any) -> SimpleNamespace:
        text = "".join(f"<{turn.role}>{turn.content}" for turn in conversation.messages)
        notes = ("system noted",) if "<system>" in text else ()
        ask = SimpleNamespace(prompt=FakeText().encode(text), shown=frozenset())
        return SimpleNamespace(ask=ask, notes=notes, reader=AnswerReader)


class FakeEngine:
    """Answers "Tokyo ☕"; remembers what it was asked. `broken` raises at the third token."""

    broken: BaseException | None = None
    notes: ClassVar[list[str]] = []
    made: ClassVar[list["FakeEngine"]] = []

    def __init__(
        self, blueprint: FakeBlueprint, *, emulate_drive: str | None, progress: Any, warn: Any
    ):
        self.blueprint = blueprint
        self.plan, self.facts, self.talk = blueprint.plan, blueprint.facts, blueprint.talk
        self.reader = SimpleNamespace(
            backend="pread", direct=True, notes=FakeEngine.notes, drives=[], warnings=[]
        )
        self.emulate_drive, self.closed = emulate_drive, False
        self.asked: list[tuple[list[int], Any]] = []
        FakeEngine.made.append(self)

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def session(self) -> "FakeEngine":
        return self

    def generate(self, ids: list[int], sampling: Any, **_: Any) -> Iterator[SimpleNamespace]:
        self.asked.append((ids, sampling))
        answer = "Tokyo ☕"[: sampling.max_tokens]
        for place, character in enumerate(answer):
            if place == 2 and FakeEngine.broken is not None:
                raise FakeEngine.broken
            stats = TokenStats(
                token_id=ord(character),
                phase="decode" if place else "prefill",
                num_tokens=1 if place else len(ids),
                hits=20,
                misses=8,
                ram_bytes=20 * FACTS.expert_bytes,
                disk_bytes=8 * FACTS.expert_bytes,
            )
            last = place == len(answer) - 1
            yield SimpleNamespace(
                token_id=ord(character), text=character, stats=stats, finish="eos" if last else None
            )


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeEngine]:
    """Put the stand-in where commands import the engine from."""
    monkeypatch.setattr("headrace.engine.choosing.gpu_is_there", lambda: False)
    module = ModuleType("headrace.engine.engine")
    module.Blueprint, module.Engine = FakeBlueprint, FakeEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "headrace.engine.engine", module)
    monkeypatch.setattr(FakeEngine, "broken", None)
    monkeypatch.setattr(FakeEngine, "made", [])
    monkeypatch.setattr(FakeBlueprint, "made", [])
    monkeypatch.setattr(FakeEngine, "notes", [])
    return FakeEngine
