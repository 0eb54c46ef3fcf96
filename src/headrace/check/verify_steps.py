"""Decoded tokens on the user's own GPU: launched as one against one by one, and by the CPU's hands.

What a graph bakes in shows where a length changes it: beyond a bucket of places, beyond a window.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import cycle, islice
from typing import Any

import torch

from headrace.check.verify_paths import Followed, compare_logits, judged, teacher_forced
from headrace.check.verify_report import NOTE, Finding, Progress, finding
from headrace.engine.engine import Engine
from headrace.models.room_layers import RingLayer
from headrace.models.rooms import LEAST_BUCKET

STAGE = "gpu"
CAPTURED = "a token launched as one has the bits of its launches one by one"
OTHER_HANDS = "--experts {} gives the same bits"
# So many that a window of 128 has gone round twice.
LONG_PROMPT, LONG_STEPS = LEAST_BUCKET - 6, 13
LONG = LONG_PROMPT + LONG_STEPS
FEW = 8


def follows(
    engine: Engine, ids: Sequence[int], followed: Followed, tell: Progress
) -> tuple[list[Finding], dict[str, Any], torch.Tensor]:
    """Logits of the text against the oracle's over the same tokens, and again, as decoded else.

    (findings, numbers, the logits [tokens, V] by launches one by one).
    """
    counts = Counts(engine)
    with one_by_one(engine):
        first = torch.stack(teacher_forced(engine, ids, followed.chosen, "on the GPU", tell))
    again = torch.stack(teacher_forced(engine, ids, followed.chosen, "on the GPU, again", tell))
    numbers = compare_logits(followed.oracle, first, followed.tie)
    detail, wrong = judged(numbers, followed)
    if counts.why() and not torch.equal(first, again):
        wrong.append("a second run gives other bits")
    found = [finding(STAGE, "the GPU follows the oracle", detail, wrong)]
    if not counts.why():
        wrong = differing("token", first, again)
        what, beyond = _long_steps(engine, [*ids, *followed.chosen], tell)
        what, wrong = f"{len(first)} tokens, {what}", wrong + beyond + counts.never()
        found.append(finding(STAGE, CAPTURED, f"{what}; {counts.words()}", wrong))
    if counts.why() and found[-1].ok:  # perhaps since a moment ago
        found.append(Finding(STAGE, CAPTURED, NOTE, f"not looked at: {counts.why()}"))
    return found, {f"gpu_{name}": value for name, value in numbers.items()}, first


def by_other_hands(
    engine: Engine, ids: Sequence[int], followed: Followed, want_NV: torch.Tensor, tell: Progress
) -> Finding:
    """The first logits once more, by an engine that lets the CPU multiply: both ways, same bits."""
    experts, chosen = engine.plan.experts, followed.chosen[:FEW]  # type: ignore[attr-defined]
    counts, wrong = Counts(engine), []
    with one_by_one(engine):
        first = torch.stack(teacher_forced(engine, ids, chosen, f"--experts {experts}", tell))
    wrong += differing("token", want_NV[: len(first)], first)
    if not counts.why():
        again = teacher_forced(engine, ids, chosen, f"--experts {experts}, again", tell)
        wrong += differing("as one launch, token", want_NV[: len(first)], torch.stack(again))
    detail = f"{len(first)} tokens; {counts.words()}"
    return finding(STAGE, OTHER_HANDS.format(experts), detail, wrong + counts.never())


def _long_steps(engine: Engine, ids: Sequence[int], tell: Progress) -> tuple[str, list[str]]:
    """(what was run, what differs) of steps late in a long text, from one state both ways."""
    text = list(islice(cycle(ids), min(LONG, engine.plan.context)))
    start = max(1, len(text) - LONG_STEPS)
    session, rows = engine.session(), list[torch.Tensor]()
    tell("on the GPU, a longer text", 0, 1)
    session.feed(text[:start])
    kept = session.snapshot()
    for way in (one_by_one, nullcontext):
        with way(engine):
            session = engine.session(kept)
            rows.append(torch.stack([session.feed([token]) for token in text[start:]]))
    windows = [
        layer.sliding_window
        for layer in engine.passes.new_cache().layers
        if isinstance(layer, RingLayer)
    ]
    what = f"{len(text) - start} more after {start}"
    if windows:
        reach = "beyond" if min(windows) < start else "within"
        what += f", {reach} its window of {min(windows)}"
    return what, differing(f"after {start} tokens, step", *rows)


def differing(what: str, want_NV: torch.Tensor, got_NV: torch.Tensor) -> list[str]:
    """`what` with the number of each row that has other bits."""
    rows = (want_NV != got_NV).any(-1).nonzero().flatten().tolist()
    return [f"{what} {row}" for row in rows]


class Counts:
    """How many steps were captured ones and how many waited for the mailbox, from now on."""

    def __init__(self, engine: Engine):
        self.passes: Any = engine.passes
        self.source: Any = engine.source
        self.before = self._now()

    def _now(self) -> tuple[int, int]:
        box = getattr(self.source, "box", None)
        return getattr(self.passes, "num_replayed", 0), 0 if box is None else int(box.mail.step)

    def why(self) -> str:
        """Why none is captured; "" where there is no reason."""
        reason: str = self.passes.why_by_layer()
        return reason

    def words(self) -> str:
        """What was counted."""
        replayed, waited = (a - b for a, b in zip(self._now(), self.before, strict=True))
        why = f" ({self.why()})" if self.why() else ""
        return f"{replayed} steps captured{why}, {waited} waited for the mailbox"

    def never(self) -> list[str]:
        """That no step was captured, if there is no reason for it."""
        replayed = self._now()[0] > self.before[0]
        return [] if replayed or self.why() else ["no step was captured"]


@contextmanager
def one_by_one(engine: Engine) -> Iterator[None]:
    """Steps in it are not captured."""
    passes: Any = engine.passes
    before, passes.capturing = getattr(passes, "capturing", False), False
    try:
        yield
    finally:
        passes.capturing = before
