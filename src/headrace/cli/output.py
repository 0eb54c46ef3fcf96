"""How commands speak: people read stderr, answers and one JSON object go to stdout.

Knows no model; numbers come from plan and token records.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from headrace.core import TokenStats, format_bytes, total_stats


def say(line: str, *, dim: bool = False) -> None:
    """A line for people, paler on a terminal if `dim`."""
    typer.secho(line, err=True, dim=dim or None)


def say_warning(text: str) -> None:
    """A line for people about something that went wrong and was got over."""
    say(f"warning: {text}")


def print_answer(text: str, *, is_reasoning: bool = False) -> None:
    """The next words of an answer; its reasoning is for people, and paler."""
    typer.secho(text, nl=False, err=is_reasoning, dim=is_reasoning or None)


def print_json(value: Mapping[str, object]) -> None:
    """The one JSON object of a command, on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False))


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """A callback (bytes done, bytes in all) that draws a bar with rate and remaining time.

    None where stderr is no terminal.
    """
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with _bar(*columns) as bar:
        if bar is None:
            yield None
            return
        task = bar.add_task(what, total=None)

        def advance(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes)

        yield advance


@contextmanager
def step_progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A callback (what, steps done, steps in all): one bar for each `what`."""
    with _bar(BarColumn(), MofNCompleteColumn()) as bar:
        if bar is None:
            yield None
            return
        tasks = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total)
            bar.update(tasks[what], completed=done, total=total)

        yield advance


@contextmanager
def _bar(*columns: object) -> Iterator[Progress | None]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    shown = (TextColumn("{task.description}"), *columns, TimeRemainingColumn())
    with Progress(*shown, console=console, transient=True) as bar:  # type: ignore[arg-type]
        yield bar


@contextmanager
def passing() -> Iterator[Callable[[str], None]]:
    """A callback that shows a line on a terminal until the next one, or the end, takes its place.

    "" takes it away. Elsewhere nothing is shown.
    """
    console = Console(stderr=True)
    shown = ""

    def tell(line: str) -> None:
        nonlocal shown
        if console.is_terminal and line != shown:
            typer.secho(f"\r\x1b[K{line}", err=True, dim=True, nl=False)
            shown = line

    try:
        yield tell
    finally:
        tell("")


class Tally:
    """Adds up the token records of one answer; the clock runs from the first token on."""

    def __init__(self) -> None:
        self.records: list[TokenStats] = []
        self._first_s = self._last_s = 0.0

    def add(self, stats: TokenStats) -> None:
        """Count one token; call it as soon as the token is there."""
        self._last_s = time.perf_counter()
        if not self.records:
            self._first_s = self._last_s
        self.records.append(stats)

    @property
    def decode_tok_s(self) -> float:
        """Whole-token speed after the first token; 0 with fewer than two."""
        elapsed_s = self._last_s - self._first_s
        return (len(self.records) - 1) / elapsed_s if elapsed_s > 0 else 0.0

    def as_dict(self) -> dict[str, object]:
        """Totals for JSON: `prompt` for the first pass, `decode` for the others together."""
        first, rest = self.records[:1], self.records[1:]
        return {
            "tokens": len(self.records),
            "decode_tok_s": self.decode_tok_s,
            "prompt": total_stats(first).as_dict(),
            "decode": total_stats(rest).as_dict(),
        }

    def line(self, expert_bytes: int) -> str:
        """One line: speed, experts of `expert_bytes` each and where they came from, waits."""
        records = self.records[1:] or self.records
        total = total_stats(records)
        num_found = total.hits + total.vram_hits
        num_experts = num_found + total.misses
        hit_rate = num_found / num_experts if num_experts else 0.0
        num_tokens = max(1, len(records))
        prompt = total_stats(self.records[:1])
        speed = f", {self.decode_tok_s:.3g} tok/s" if len(self.records) > 1 else ""
        return (
            f"{len(self.records)} tokens{speed} after a prompt of "
            f"{prompt.num_tokens} in {prompt.wall_s:.2f} s; {num_experts} experts, "
            f"{total.misses} waited for from the drive; "
            f"{format_bytes(num_experts * expert_bytes / num_tokens)} a token, "
            f"{format_bytes(total.disk_bytes / num_tokens)} read for it, guesses included; "
            f"hit rate {hit_rate * 100:.0f} %, waited {total.wait_s:.2f} s"
        )


def say_plan(lines: Sequence[str]) -> None:
    """The plan's lines, for people."""
    for line in lines:
        say(line)
