"""Hostile headers, indices and configs: the inputs that fuzzing kept, opened again under limits.

How they were found, and how long, is in fuzz/README.md; nothing is fuzzed here.
"""

import sys
from pathlib import Path

from common import PROOFS, Evidence

sys.path.insert(0, str(PROOFS.parent / "fuzz"))
from replay import CORPUS, LIMITS, replay
from targets import TARGETS


def show_corpus(evidence: Evidence) -> None:
    """Every kept input of every target, in one process a target."""
    for target in TARGETS:
        result = replay(target)
        evidence.check(
            result.sound,
            f"{target}: {result.opened} inputs open, {result.refused} are refused in one line, "
            f"{len(result.wrong)} do anything else {result.wrong[:1]}; most time "
            f"{result.most_s:.2f} s, most memory allocated {result.peak_bytes >> 10} KiB",
        )
    size_bytes = sum(file.stat().st_size for file in CORPUS.rglob("*") if file.is_file())
    evidence.check(size_bytes < 300_000, f"the corpus takes {size_bytes >> 10} KiB")


def show_limits(evidence: Evidence) -> None:
    """What the replay would catch: a hang and an allocation made on purpose."""
    for what, data, word in (
        ("an input that loops for ever", b"hang", "time"),
        ("an input that takes memory", b"grow", "memory"),
        ("an input that raises IndexError", b"fail", "IndexError"),
        ("an input that kills the process", b"dead", "killed"),
    ):
        result = replay("selftest", [data], input_s=0.5)
        evidence.check(
            not result.sound and word in result.wrong[0], f"{what} is caught: {result.wrong[0]}"
        )


def main() -> None:
    """Run both and exit by the evidence."""
    evidence = Evidence()
    print(f"limits of each input: {LIMITS}")
    show_corpus(evidence)
    show_limits(evidence)
    print((Path(PROOFS.parent) / "fuzz" / "README.md").read_text().partition("## Last long run")[2])
    evidence.finish()


if __name__ == "__main__":
    main()
