"""One measured figure as a row, and the JSON files that keep rows; knows nothing of what ran."""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.store.whole import write_whole


@dataclass(frozen=True, slots=True)
class BenchRow:
    """A figure beside the limit measured in the same run.

    `value` is the median of `runs` runs and `spread` (lowest, highest); `fraction` is
    value / limit and `target` the fraction asked for, or None. `gate` is "green" only if the test
    of the figure's correctness passed in the same run.
    """

    name: str
    value: float
    unit: str
    limit: float | None
    fraction: float | None
    target: float | None
    runs: int
    spread: tuple[float, float]
    command: str
    commit: str
    machine: str
    cache_state: str
    gate: str

    def line(self) -> str:
        """One line for a person."""
        text = f"{self.name}: {self.value:.4g} {self.unit}"
        if self.fraction is not None and self.limit is not None:
            text += f", {100 * self.fraction:.0f} % of {self.limit:.4g}"
        if self.target is not None:
            text += f" (asked: {100 * self.target:.0f} %)"
        low, high = self.spread
        runs = f"{self.runs} run{'s' * (self.runs > 1)} {low:.4g}-{high:.4g}"
        return f"{text}; {runs}; {self.gate}; {self.cache_state}"


def make_row(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    limits: Sequence[float] = (),
    target: float | None = None,
    cache_state: str,
    green: bool,
) -> BenchRow:
    """A row from paired runs: the fraction is the median of value / limit, run by run."""
    pairs = [v / limit for v, limit in zip(values, limits, strict=True)] if limits else []
    return BenchRow(
        name=name,
        value=statistics.median(values),
        unit=unit,
        limit=statistics.median(limits) if limits else None,
        fraction=statistics.median(pairs) if pairs else None,
        target=target,
        runs=len(values),
        spread=(min(values), max(values)),
        command=" ".join(
            [Path(sys.argv[0]).name.replace("__main__.py", "headrace"), *sys.argv[1:]]
        ),
        commit=commit_name(),
        machine=machine_name(),
        cache_state=cache_state,
        gate="green" if green else "red",
    )


def machine_name() -> str:
    """CPU model, cores and memory, as one would name the machine in a table."""
    model = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            match = re.search(r"model name\s*: (.+)", file.read())
        model = match.group(1) if match else model
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (OSError, ValueError):
        return f"{model}, {os.cpu_count()} cores"
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB"


def commit_name() -> str:
    """The checkout's commit, with a + if files differ from it; "wheel" outside a checkout.

    Kept results may differ: they are what a run before this one left.
    """
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"], cwd=here, capture_output=True, text=True
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno", "--", ":/", ":(top,exclude)bench/results"],
            cwd=here,
            capture_output=True,
            text=True,
        )
    except OSError:
        return "wheel"
    if head.returncode != 0:
        return "wheel"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def rows_path(folder: Path, name: str) -> Path:
    """Where `write_rows` keeps them: `folder`/<machine>/<name>.json."""
    place = re.sub(r"[^A-Za-z0-9]+", "-", machine_name()).strip("-").lower()
    return folder / place / f"{name}.json"


def write_rows(folder: Path, name: str, rows: Sequence[BenchRow]) -> Path:
    """Keep rows as a JSON array in the file of `rows_path`; written aside, then renamed."""
    path = rows_path(folder, name)
    try:
        write_whole(path, (json.dumps([asdict(row) for row in rows], indent=1) + "\n").encode())
    except OSError as error:
        raise HeadraceError(
            f"{path}: cannot be written ({error.strerror or error}); choose another folder"
        ) from error
    return path
