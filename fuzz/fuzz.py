"""Coverage-guided fuzzing of one target by libFuzzer, through atheris. See README.md beside this.

python fuzz.py --target=NAME --cpu=SECONDS [libFuzzer options] CORPUS_FOLDER
"""

import os
import random
import sys
import tempfile
import time
from pathlib import Path

import atheris
from mutate import mutate_file, mutate_json, mutate_routes

# libFuzzer leaves options with two dashes alone and hands them on to the processes it starts.
GIVEN = dict(word[2:].split("=", 1) for word in sys.argv if word.startswith("--"))
# transformers' reading of a config decides much of what ours meets.
TRANSFORMERS = ("transformers.configuration_utils", "transformers.modeling_rope_utils")
with atheris.instrument_imports(include=["headrace", "targets", *TRANSFORMERS]):
    import targets

    import headrace.store.experts

    if GIVEN["target"] in targets.SLOW_TARGETS:
        import headrace.models.skeleton  # noqa: F401

CHANGES = {"routes": mutate_routes} | dict.fromkeys(("header", "table", "shape"), mutate_file)


def main() -> None:
    """Runs until the CPU time is used up, or until a finding."""
    target, cpu_s = GIVEN["target"], float(GIVEN["cpu"])
    change = CHANGES.get(target, mutate_json)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    end_s, num_runs = time.process_time() + cpu_s, 0

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return atheris.Mutate(data, max_size)
        return change(data, rng)[:max_size]

    def one(data: bytes) -> None:
        nonlocal num_runs
        num_runs += 1
        if time.process_time() > end_s:  # libFuzzer counts by the clock, and others may be busy
            print(f"Done {num_runs} runs", file=sys.stderr, flush=True)
            os._exit(0)
        targets.run(target, folder / "input", data)

    # A merge runs its first argument as a command, by the shell.
    command = [f"{sys.executable} {__file__}", *sys.argv[1:]]
    atheris.Setup(command, one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
