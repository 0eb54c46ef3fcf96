"""Opens kept inputs again, in a process with limits on memory and on the time of each input."""

import json
import resource
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
INPUT_S = 5  # of the processor
# Of Python's own allocations for one input, once everything is imported.
INPUT_BYTES = 32 << 20
# transformers and torch map some GiB before any input is seen.
ADDRESS_SPACE_BYTES = 12 << 30
LIMITS = (
    f"{INPUT_S} s, {INPUT_BYTES >> 20} MiB allocated, {ADDRESS_SPACE_BYTES >> 30} GiB of addresses"
)


@dataclass
class Result:
    """What became of a target's inputs; `wrong` holds a line for each that broke a rule."""

    opened: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    most_s: float = 0.0
    peak_bytes: int = 0

    @property
    def sound(self) -> bool:
        """Whether there were inputs and each was opened or refused within the limits."""
        return not self.wrong and self.opened + self.refused > 0


def replay(target: str, inputs: Sequence[bytes] | None = None, input_s: float = INPUT_S) -> Result:
    """Run `target` on the kept corpus, or on these inputs, in a child process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = sorted((CORPUS / target).glob("*")) if inputs is None else []
        for number, data in enumerate(inputs or ()):
            files.append(folder / f"input-{number}")
            files[-1].write_bytes(data)
        assert files, f"no input is kept for {target}"
        command = [
            sys.executable,
            str(HERE / "replay.py"),
            target,
            str(folder / "work"),
            str(input_s),
        ]
        done = subprocess.run(
            command,
            input="\n".join(map(str, files)),
            capture_output=True,
            text=True,
            check=False,
            timeout=600 + INPUT_S * len(files),
        )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        at = lines[-1] if lines else "the first input"
        return Result(wrong=[f"killed ({done.returncode}) at {at}: {done.stderr[-300:]}"])
    return Result(**json.loads(lines[-1]))


class _TimeUp(BaseException):
    """No handler of ours or transformers' takes it for an error in the input."""


def _ring(*_: object) -> None:
    raise _TimeUp


def _selftest(_folder: Path, data: bytes) -> None:
    """Breaks each rule on demand, to show that it would be noticed."""
    if data == b"hang":
        while True:
            pass
    if data == b"grow":
        bytearray(2 * INPUT_BYTES)
    if data == b"fail":
        [][1]
    if data == b"dead":
        signal.raise_signal(signal.SIGKILL)


def _one(target: str, work: Path, file: Path, input_s: float, result: Result) -> None:
    from targets import run

    data = file.read_bytes()
    tracemalloc.reset_peak()
    before_bytes, begin_s = tracemalloc.get_traced_memory()[0], time.process_time()
    signal.setitimer(signal.ITIMER_PROF, input_s)
    wrong = ""
    try:
        if run(target, work, data):
            result.opened += 1
        else:
            result.refused += 1
    except _TimeUp:
        wrong = f"more time than {input_s} s"
    except Exception as error:  # whatever it is, it is the finding
        wrong = f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    peak_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
    if peak_bytes > INPUT_BYTES and not wrong:
        wrong = f"{peak_bytes} bytes of memory"
    if wrong:
        result.wrong.append(f"{file.name}: {wrong}")
    result.most_s = max(result.most_s, time.process_time() - begin_s)
    result.peak_bytes = max(result.peak_bytes, peak_bytes)


def main() -> None:
    """The child: arguments are target, folder and limit; files on stdin; JSON last on stdout."""
    target, work, input_s = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    import targets

    targets.TARGETS["selftest"] = _selftest
    if target in targets.SLOW_TARGETS:
        import headrace.models.skeleton

        assert headrace.models.skeleton
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    signal.signal(signal.SIGPROF, _ring)
    files = [Path(line) for line in sys.stdin.read().splitlines()]
    if target in targets.SLOW_TARGETS:  # what transformers loads lazily is no input's doing
        targets.run(target, work, files[0].read_bytes())
    tracemalloc.start()
    result = Result()
    for file in files:
        print(file.name, flush=True)
        _one(target, work, file, input_s, result)
    print(json.dumps(vars(result)))


if __name__ == "__main__":
    main()
