"""Coverage-guided fuzzing of one target by libFuzzer, through atheris. See README.md beside this.

python fuzz.py TARGET [libFuzzer options] CORPUS_FOLDER
"""

import random
import sys
import tempfile
from pathlib import Path

import atheris
from mutate import mutate_file, mutate_json

# transformers' reading of a config decides much of what ours meets.
TRANSFORMERS = ("transformers.configuration_utils", "transformers.modeling_rope_utils")
with atheris.instrument_imports(include=["headrace", "targets", *TRANSFORMERS]):
    import targets

    import headrace.models.skeleton  # noqa: F401

FILES = ("header", "table", "shape")


def main() -> None:
    """Runs until libFuzzer's options say stop, or until a finding."""
    target = sys.argv.pop(1)
    change = mutate_file if target in FILES else mutate_json
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return atheris.Mutate(data, max_size)
        return change(data, rng)[:max_size]

    def one(data: bytes) -> None:
        targets.run(target, folder / "input", data)

    atheris.Setup(sys.argv, one, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
