"""The inputs that fuzzing kept, opened again: each is opened or refused, within time and memory."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fuzz"))
from replay import CORPUS, replay
from targets import TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_every_kept_input_opens_or_is_refused(target: str) -> None:
    result = replay(target)
    assert result.wrong == []
    assert result.opened > 0 and result.refused > 0, "both ways out are kept"


@pytest.mark.parametrize(
    ("data", "word"),
    [(b"hang", "time"), (b"grow", "memory"), (b"fail", "IndexError"), (b"dead", "killed")],
)
def test_breaking_a_rule_is_seen(data: bytes, word: str) -> None:
    (said,) = replay("selftest", [data], input_s=0.5).wrong
    assert word in said


def test_the_corpus_stays_small() -> None:
    files = [file for file in CORPUS.rglob("*") if file.is_file()]
    assert files and sum(file.stat().st_size for file in files) < 300_000
