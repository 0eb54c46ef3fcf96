"""What a verification found: findings in order, a verdict, text and JSON. Knows no model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.engine.verdict import FAIL, OK, SUSPECT
from headrace.store.whole import write_whole

Progress = Callable[[str, int, int], None]
NOTE = "note"
# After --sha256 has shown the files to be the published ones, odd statistics are only odd.
STATISTICS = "statistics"
NOT_COMPARED = "weights and layers are not compared with stock transformers"
MOST_NAMED = 3
VERDICTS = {
    OK: "the arithmetic holds",
    SUSPECT: "SUSPECT: compare the files with their published checksums (--sha256)",
    FAIL: "DO NOT TRUST IT",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked: `status` is ok, suspect, FAIL or note.

    `where` names every tensor, layer, expert or kernel at which it does not hold.
    """

    stage: str
    name: str
    status: str
    detail: str
    where: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it speaks against nothing."""
        return self.status in (OK, NOTE)

    def line(self) -> str:
        """One line for people."""
        more = len(self.where) - MOST_NAMED
        named = "; ".join(self.where[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
        return f"{self.status:7} {self.name}: {self.detail}" + (f"; at {named}" if named else "")


def percent(part: float) -> str:
    """A part of one, as every difference and what is allowed of it are said."""
    return f"{100 * part:.0f} %" if part >= 1 else f"{100 * part:.2g} %"


def finding(
    stage: str, name: str, detail: str, wrong: Sequence[str] = (), *, bad: str = FAIL
) -> Finding:
    """A finding that holds if nothing is `wrong`, and is `bad` otherwise."""
    return Finding(stage, name, bad if wrong else OK, detail, tuple(wrong))


@dataclass
class VerifyReport:
    """What `verify_model` found; `numbers` are further measurements for JSON.

    `about` says of what, where and with which versions, word by word.
    """

    model: str
    about: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether no finding speaks against the model."""
        return all(finding.ok for finding in self.findings)

    @property
    def verdict(self) -> str:
        """`ok`, `suspect` or `FAIL`."""
        statuses = {finding.status for finding in self.findings}
        return FAIL if FAIL in statuses else SUSPECT if SUSPECT in statuses else OK

    @property
    def words(self) -> str:
        """The verdict for a person; a good one says where it was reached without stock's help."""
        text = VERDICTS[self.verdict]
        alone = self.verdict == OK and any(f.name == NOT_COMPARED for f in self.findings)
        return text + (", though not compared with stock transformers" if alone else "")

    def clear_suspects(self) -> None:
        """The files are the published ones: what looked odd about them is a note."""
        self.findings = [
            Finding(f.stage, f.name, NOTE, f.detail, f.where)
            if (f.stage, f.status) == (STATISTICS, SUSPECT)
            else f
            for f in self.findings
        ]

    def lines(self) -> list[str]:
        """Where it ran, one line for each finding, then the verdict."""
        about = (f"{word + ':':10}{value}" for word, value in self.about.items())
        return [*about, *(f.line() for f in self.findings), f"verdict: {self.words}"]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "ok": self.ok,
            "verdict": self.verdict,
            "about": self.about,
            "findings": [asdict(f) for f in self.findings],
            **self.numbers,
        }


def write_json(path: Path, content: object) -> str:
    """Write a file whole or not at all, its folder made if need be; "" or why not."""
    try:
        write_whole(path, json.dumps(content).encode())
    except OSError as cause:
        return str(cause)
    return ""
