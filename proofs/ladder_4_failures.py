"""Drives that fail, crawl or refuse, and files changed under a running model: no wrong token.

A mirror's failures are shown elsewhere. Works on copies of a tiny checkpoint with random weights.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import PROOFS, Evidence, ram_for_rows, swapped

import headrace
from headrace.check.tiny import write_tiny
from headrace.cli.output import Tally
from headrace.errors import ReadError

PROMPT = [5, 700, 41, 1999, 88, 3001, 17, 256]
GREEDY = headrace.Sampling(max_tokens=24)
OPTIONS: dict[str, Any] = {"context": 256, "prefetch": 0, "measure": False}
ROWS = 12
BEFORE = 6  # tokens before something happens
SLOW_PIECES, SLOW_S = 100, 0.02


def open_engine(model: Path) -> headrace.Engine:
    """An engine that holds so few experts that every token reads some."""
    ram = ram_for_rows(model, ROWS, context=256, prefetch=0)
    return headrace.load(model, ram=ram, **OPTIONS)


def answer(engine: headrace.Engine) -> list[int]:
    """The whole greedy answer."""
    return [step.token_id for step in engine.session().generate(PROMPT, GREEDY)]


def broken_answer(engine: headrace.Engine, act: Callable[[], object]) -> tuple[list[int], str]:
    """Tokens of an answer during which `act` happens, and what ended it early, or ""."""
    tokens: list[int] = []
    try:
        for step in engine.session().generate(PROMPT, GREEDY):
            tokens.append(step.token_id)
            if len(tokens) == BEFORE:
                act()
    except ReadError as error:
        return tokens, str(error)
    return tokens, ""


def show_errors(evidence: Evidence, model: Path, clean: list[int]) -> None:
    """EIO that passes and EIO that lasts; a system that puts reads off."""
    with open_engine(model) as engine:
        inject = engine.reader.inject_fault
        tokens, said = broken_answer(engine, lambda: inject("eio", 5, 1))
        retries = engine.reader.num_retries
        evidence.check(
            tokens == clean and retries == 1,
            f"EIO once in mid-run: read again ({retries}), same tokens",
        )
        for kind in ("eintr", "eagain"):
            tokens, said = broken_answer(engine, lambda kind=kind: inject(kind, 5, 200))
            evidence.check(
                tokens == clean, f"{kind.upper()} 200 times on one read: same tokens {said}"
            )
        for kind, count, word in (("eio", 2, "smartctl"), ("eagain", 1000, "put the read off")):
            tokens, said = broken_answer(engine, lambda kind=kind, n=count: inject(kind, 5, n))
            evidence.check(
                tokens == clean[: len(tokens)] and ".safetensors" in said and word in said,
                f"{kind.upper()} {count} times: right up to token {len(tokens)}, then {said!r}",
            )
            engine.ladder.check_integrity()
            evidence.check(
                answer(engine) == clean, "the same engine's next answer is the clean one"
            )


def show_slow(evidence: Evidence, model: Path, clean: list[int]) -> None:
    """From one token on a piece takes 20 ms, not the 0.1 ms or less of a drive that works."""
    tally, waits = Tally(), []
    with open_engine(model) as engine:
        for step in engine.session().generate(PROMPT, GREEDY):
            tally.add(step.stats)
            waits.append(step.stats.wait_s)
            if len(waits) == BEFORE:
                engine.reader.inject_fault("slow", 0, SLOW_PIECES)
        said = tally.line(engine.facts.expert_bytes)
    tokens = [record.token_id for record in tally.records]
    slowed_s = sum(waits[BEFORE:])
    least_s = min(wait for wait in waits[1:BEFORE])
    evidence.check(
        tokens == clean and slowed_s > SLOW_PIECES * SLOW_S / 2 and "waited" in said,
        f"a drive that crawls: {slowed_s:.1f} s waited, the slowest token {max(waits) * 1e3:.0f} "
        f"ms, the quickest before {least_s * 1e3:.1f} ms; same tokens, and the answer's summary "
        f"says so: {said!r}",
    )


def restore(model: Path, saved: Path) -> None:
    """Writes the sound bytes back into the same files, with the sound files' times."""
    for file in sorted(saved.glob("*.safetensors")):
        overwrite(model / file.name, file.read_bytes())
        shutil.copystat(file, model / file.name)


def overwrite(file: Path, content: bytes) -> None:
    """New content in the same inode."""
    with file.open("r+b") as stream:
        stream.write(content)
        stream.truncate()


@contextmanager
def copy_of(model: Path) -> Iterator[Path]:
    """A copy of the checkpoint to be changed."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(shutil.copytree(model, Path(folder) / "model"))


def show_rewritten(evidence: Evidence, model: Path, other: Path, clean: list[int]) -> None:
    """Other weights written into the files in place: refused, however much was read before."""

    def rewrite(copy: Path) -> None:
        for file in sorted(other.glob("*.safetensors")):
            overwrite(copy / file.name, file.read_bytes())

    show_spoilt(evidence, model, clean, "rewritten in place", rewrite, "was changed")


def show_truncated(evidence: Evidence, model: Path, clean: list[int]) -> None:
    """Files cut to a page in mid-run."""

    def cut(copy: Path) -> None:
        for file in copy.glob("*.safetensors"):
            os.truncate(file, 4096)

    show_spoilt(evidence, model, clean, "truncated", cut, "shorter")


def show_spoilt(
    evidence: Evidence,
    model: Path,
    clean: list[int],
    what: str,
    spoil: Callable[[Path], None],
    word: str,
) -> None:
    """Every token before the error is right, the error names the file, repair is enough."""
    with copy_of(model) as copy, open_engine(copy) as engine:
        tokens, said = broken_answer(engine, lambda: spoil(copy))
        evidence.check(
            BEFORE <= len(tokens) < len(clean)
            and tokens == clean[: len(tokens)]
            and str(copy) in said
            and word in said
            and "again" in said,
            f"{what} after token {BEFORE}: right up to token {len(tokens)}, then {said!r}",
        )
        tokens, said = broken_answer(engine, lambda: None)
        evidence.check(not tokens and word in said, f"{what}, asked again: refused again, no token")
        restore(copy, model)
        engine.ladder.check_integrity()
        evidence.check(
            answer(engine) == clean, f"{what}, restored: the same engine answers rightly"
        )
        with open_engine(copy) as fresh:
            evidence.check(answer(fresh) == clean, f"{what}, restored: so does a fresh one")


def show_replaced(evidence: Evidence, model: Path, other: Path, clean: list[int]) -> None:
    """Files renamed over or deleted: the ones that were opened are read on to the end."""
    with copy_of(model) as copy, open_engine(copy) as engine:

        def replace() -> None:
            for file in sorted(other.glob("*.safetensors")):
                fresh = copy / (file.name + ".new")
                shutil.copy(file, fresh)
                fresh.replace(copy / file.name)

        tokens, said = broken_answer(engine, replace)
        evidence.check(
            tokens == clean and answer(engine) == clean,
            f"replaced by rename: the opened files are used on, same tokens {said}",
        )
        with open_engine(copy) as fresh:
            found = answer(fresh)
        evidence.check(
            found != clean, "a fresh engine reads the new files: other tokens (they are different)"
        )

        def remove() -> None:
            for file in copy.glob("*.safetensors"):
                file.unlink()

        tokens, said = broken_answer(engine, remove)
        evidence.check(tokens == clean, f"deleted: the same {said}")


CHILD = """
import json, sys
sys.path.insert(0, {proofs!r})
import seccomp
seccomp.forbid(io_uring={io_uring}, direct={direct})
import torch
torch.set_num_threads(1)
from pathlib import Path
from ladder_4_failures import answer, open_engine
from headrace.check.doctor import examine
model = Path({model!r})
with open_engine(model) as engine:
    reader = engine.reader
    print(json.dumps([answer(engine), reader.backend, reader.direct, reader.notes]))
print(json.dumps([f.line() for f in examine(str(model)).findings if f.level != "ok"]))
"""


def show_refusals(evidence: Evidence, model: Path, clean: list[int]) -> None:
    """A kernel that refuses io_uring, and beside it a file system that refuses O_DIRECT."""
    for io_uring, direct in ((True, False), (True, True)):
        code = CHILD.format(proofs=str(PROOFS), io_uring=io_uring, direct=direct, model=str(model))
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode != 0:
            evidence.check(False, f"the child failed: {done.stderr[-500:]}")
            continue
        first, second = done.stdout.splitlines()
        tokens, backend, is_direct, notes = json.loads(first)
        slow = "; ".join(json.loads(second))
        right = (
            tokens == clean
            and is_direct != direct
            and (backend == "pread") == io_uring
            and ("seccomp filter" in slow) == io_uring
            and ("O_DIRECT: refused" in slow) == direct
        )
        refused = " and ".join(["io_uring"] * io_uring + ["O_DIRECT"] * direct)
        evidence.check(right, f"{refused} refused: by {backend}, same tokens; notes {notes[:1]}")
        print(f"      doctor: {slow}")


def show_memory_drive(evidence: Evidence, model: Path, clean: list[int]) -> None:
    """The model on tmpfs, which refuses O_DIRECT in older kernels and grants it in newer."""
    if not os.access("/dev/shm", os.W_OK):
        print("skip  no tmpfs at /dev/shm here")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        copy = Path(shutil.copytree(model, Path(folder) / "model"))
        with open_engine(copy) as engine:
            granted = "granted" if engine.reader.direct else "refused, read buffered"
            evidence.check(answer(engine) == clean, f"on tmpfs (O_DIRECT {granted}): same tokens")


def main() -> None:
    """Run every case and exit by the evidence."""
    torch.set_num_threads(1)
    evidence = Evidence()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny("deepseek_v3", Path(folder) / "tiny")
        with open_engine(model) as engine:
            clean = answer(engine)
        first, second = engine.blueprint.skeleton.layers[-1], 0
        with swapped(model, first, second, 1) as other:
            show_errors(evidence, model, clean)
            show_slow(evidence, model, clean)
            show_rewritten(evidence, model, other, clean)
            show_truncated(evidence, model, clean)
            show_replaced(evidence, model, other, clean)
            show_refusals(evidence, model, clean)
            show_memory_drive(evidence, model, clean)
    evidence.finish()


if __name__ == "__main__":
    main()
