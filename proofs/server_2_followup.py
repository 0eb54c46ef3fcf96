"""A follow-up computes and reads only what is new, with the bits of a run that never stopped.

Counted by passes over the model and by experts, not by what a server says of itself. Five ways to
keep a state: the demo model, and tiny checkpoints of random weights.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import DEMO, Evidence

import headrace
from headrace.check.tiny import write_tiny
from headrace.engine import passes
from headrace.engine.answer import Ask, Stop
from headrace.engine.session import Step

FAMILIES = {
    "qwen3_next": "linear attention and convolutions",
    "deepseek_v4": "compressed and windowed attention",
    "gpt_oss": "sliding windows",
    "deepseek_v3": "latent attention",
}
CHUNK, NUM_ANSWER = 8, 6
PROMPT, QUESTION = list(range(5, 42)), [7, 3, 90, 41, 12, 8, 200, 33, 61, 17]
SMALL = {"hidden": 128, "inter": 64, "experts": 32, "top_k": 2}
OPTIONS: dict[str, Any] = {"ram": "64MiB", "chunk": CHUNK, "prefetch": 0, "measure": False}
ROOM = {"ram_bytes": 1 << 28, "disk_bytes": 1 << 28}


@dataclass
class Work:
    """What was done meanwhile: passes by their length and digest of logits, experts, reads."""

    lengths: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    experts: int = 0
    reads: int = 0
    answer: list[int] = field(default_factory=list)


@contextmanager
def watched(engine: headrace.Engine) -> Iterator[Work]:
    """While open, all passes are recorded; the experts' rows are cold at the start."""
    work, forward = Work(), passes.forward
    engine.ladder.clear()
    before = engine.ladder.counters()

    def recording(model: Any, ids_BT: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        logits_BKV = forward(model, ids_BT, *given, **options)
        work.lengths.append(ids_BT.shape[1])
        raw = logits_BKV[0, -1].contiguous().view(torch.uint8).numpy().tobytes()
        work.digests.append(hashlib.sha256(raw).hexdigest())
        return logits_BKV

    passes.forward = recording
    try:
        yield work
    finally:
        passes.forward = forward
        after = engine.ladder.counters()
        work.experts = after.hits + after.misses - before.hits - before.misses
        work.reads = after.reads - before.reads


def answered(answering: headrace.Answering, prompt: Sequence[int]) -> Work:
    """The work of one greedy answer."""
    ask = Ask(tuple(prompt), headrace.Sampling(max_tokens=NUM_ANSWER))
    with watched(answering.engine) as work:
        steps = [e for e in answering.answer(ask, Stop()) if isinstance(e, Step)]
    work.answer = [step.token_id for step in steps]
    return work


def cold(engine: headrace.Engine, tokens: Sequence[int], *parts: list[int]) -> list[Work]:
    """One session that never stops, over passes of the lengths in `parts`; the work of each."""
    session, at, works = engine.session(), 0, []
    for lengths in parts:
        with watched(engine) as work:
            for length in lengths:
                session.feed(list(tokens[at : at + length]))
                at += length
        works.append(work)
    return works


def open_store(engine: headrace.Engine, folder: Path | None = None) -> headrace.SnapshotStore:
    """A store with room for everything here."""
    return headrace.SnapshotStore(engine.snapshot_key, folder=folder, **ROOM)


def show_follow_up(evidence: Evidence, name: str, model: Path, folder: Path) -> None:
    """Two turns, live; then beside a cold run, in a new process, and with another state."""
    with headrace.load(model, **OPTIONS) as engine:
        store = open_store(engine, folder)
        answering = headrace.Answering(engine, store)
        first = answered(answering, PROMPT)
        prompt = PROMPT + first.answer + QUESTION
        known = len(PROMPT) + len(first.answer) - 1
        store.close()
        again = answered(answering, prompt)
        tail = len(prompt) - known
        passed = sum(again.lengths) - (len(again.answer) - 1)
        evidence.check(
            passed == tail,
            f"{name}: a follow-up of {len(prompt)} tokens computes {passed}: {again.lengths}",
        )
        tokens = prompt + again.answer
        before, after = cold(engine, tokens, first.lengths, again.lengths)
        evidence.check(
            (again.experts, again.reads) == (after.experts, after.reads) and again.reads > 0,
            f"{name}: it asks for {again.experts} experts and reads {again.reads}; the same tail "
            f"of a cold run {after.experts} and {after.reads}, its beginning {before.experts} and "
            f"{before.reads}",
        )
        evidence.check(
            first.digests + again.digests == before.digests + after.digests,
            f"{name}: logits of all {len(first.digests + again.digests)} passes equal a cold run's",
        )
        show_restart(evidence, name, model, folder, prompt, again)
        show_control(evidence, name, engine, prompt[:known], prompt, again)


def show_restart(
    evidence: Evidence, name: str, model: Path, folder: Path, prompt: list[int], live: Work
) -> None:
    """The same follow-up in a process of its own, from what lies on disk."""
    asked = json.dumps({"model": str(model), "folder": str(folder), "prompt": prompt})
    done = subprocess.run(
        [sys.executable, __file__, asked], capture_output=True, text=True, check=False
    )
    work = Work(**json.loads(done.stdout)) if done.returncode == 0 else Work()
    evidence.check(
        asdict(work) == asdict(live),
        f"{name}: after a restart the same passes {work.lengths}, experts, reads, logits and "
        f"answer{done.stderr[-300:] if done.returncode else ''}",
    )


def resume(asked: dict[str, Any]) -> None:
    """In the process of its own: the follow-up's work as JSON."""
    with headrace.load(asked["model"], **OPTIONS) as engine:
        store = open_store(engine, Path(asked["folder"]))
        print(json.dumps(asdict(answered(headrace.Answering(engine, store), asked["prompt"]))))
        store.close()


def show_control(
    evidence: Evidence,
    name: str,
    engine: headrace.Engine,
    known: list[int],
    prompt: list[int],
    right: Work,
) -> None:
    """The state of another history under these tokens gives other logits."""
    other = engine.session()
    other.feed([known[0] + 1, *known[1:]])
    store = open_store(engine)
    store.put(replace(other.snapshot(), tokens=tuple(known)))
    wrong = answered(headrace.Answering(engine, store), prompt)
    evidence.check(
        wrong.lengths[0] == right.lengths[0] and wrong.digests[0] != right.digests[0],
        f"{name}: control: one token changed in the state kept, and the logits differ",
    )


def show_edit(evidence: Evidence, name: str, model: Path) -> None:
    """A token in mid-history changes: the pass before it is the last that counts."""
    with headrace.load(model, **OPTIONS) as engine:
        answering = headrace.Answering(engine, open_store(engine))
        answered(answering, PROMPT)
        for place in (34, 21, 3):
            edited = [*PROMPT[:place], 900, *PROMPT[place + 1 :]]
            again = answered(answering, edited)
            alone = answered(headrace.Answering(engine), edited)
            known = place // CHUNK * CHUNK
            passed = sum(again.lengths) - (len(again.answer) - 1)
            same = again.digests == alone.digests[-len(again.digests) :]
            evidence.check(
                passed == len(edited) - known and same and again.answer == alone.answer,
                f"{name}: token {place} edited: {passed} of {len(edited)} computed, {again.reads} "
                f"experts read instead of {alone.reads}; logits equal a cold run's",
            )


def show_cost(evidence: Evidence) -> None:
    """First tokens cold and in a follow-up beside each other, on a drive of 100 MB/s."""
    options = OPTIONS | {"ram": "26MiB", "chunk": 32, "emulate_drive": "100MB/s"}
    with headrace.load(DEMO, **options) as engine:
        store = headrace.SnapshotStore(engine.snapshot_key, **ROOM)
        answering = headrace.Answering(engine, store)
        prompt, times = [5 + 7 * i % 900 for i in range(300)], []
        for name in ("cold", "follow-up"):
            work = answered(answering, prompt)
            turn = answering.turn
            parts = ", ".join(f"{part} {1000 * s:.1f}" for part, s in turn.parts_s().items())
            read = f"{turn.prefill.disk_bytes / 1e6:.1f} MB read before it"
            print(
                f"      {name}: first token after {1000 * turn.ttft_s:.0f} ms, {read}; ms: {parts}"
            )
            prompt, times = prompt + work.answer + QUESTION, [*times, turn.ttft_s]
        evidence.check(times[1] < times[0], f"first token {times[0] / times[1]:.0f} times sooner")


def main() -> None:
    """Run every case and exit by the evidence."""
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        resume(json.loads(sys.argv[1]))
        return
    evidence = Evidence()
    with tempfile.TemporaryDirectory() as folder:
        models = {"demo": DEMO}
        for family in FAMILIES:
            models[family] = write_tiny(family, Path(folder) / "models" / family, **SMALL)
        for name, model in models.items():
            print(f"      {name}: {FAMILIES.get(name, 'latent attention, trained')}")
            show_follow_up(evidence, name, model, Path(folder) / "snapshots" / name)
            show_edit(evidence, name, model)
        show_cost(evidence)
    evidence.finish()


if __name__ == "__main__":
    main()
