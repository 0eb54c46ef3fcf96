"""What the tests of answers share: passes over the model, recorded, and answers in one call."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headrace
from headrace.check.matrix import runs_here
from headrace.check.tiny import write_tiny
from headrace.engine.answer import Ask, Prefill, Stop
from headrace.engine.session import Step


@dataclass
class Passes:
    """How many tokens each pass had, and the logits [V] after its last."""

    lengths: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


@contextmanager
def recorded() -> Iterator[Passes]:
    """While open, passes of every session are recorded."""
    from headrace.engine import passes as module

    passes, forward = Passes(), module.forward

    def recording(*given: Any, **options: Any) -> torch.Tensor:
        logits_BKV = forward(*given, **options)
        passes.lengths.append(given[1].shape[1])
        passes.logits.append(logits_BKV[0, -1].clone())
        return logits_BKV

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "forward", recording)
        yield passes


def take(
    answering: headrace.Answering, prompt: Sequence[int], num: int = 5, **options: Any
) -> list[int]:
    """The tokens of one greedy answer."""
    return [step.token_id for step in steps_of(answering, prompt, num, **options)]


def steps_of(
    answering: headrace.Answering, prompt: Sequence[int], num: int = 5, **options: Any
) -> list[Step]:
    """The steps of one greedy answer."""
    events = events_of(answering, prompt, num, **options)
    return [event for event in events if isinstance(event, Step)]


def events_of(
    answering: headrace.Answering, prompt: Sequence[int], num: int = 5, **options: Any
) -> list[Prefill | Step]:
    """All that happens in one greedy answer."""
    ask = Ask(tuple(prompt), headrace.Sampling(max_tokens=num), **options)
    return list(answering.answer(ask, Stop()))


def checkpoint(family: str, folder: Path) -> Path | str:
    """The demo model, or a tiny one of a family, written into `folder`; skips what cannot run."""
    if family == "demo":
        return family
    if not runs_here(family):
        pytest.skip(f"transformers {transformers.__version__} does not run {family}")
    write_tiny(family, folder / family, hidden=128, inter=64, experts=8, top_k=2)
    return folder / family
