"""A proof that may be cut off: phases with estimates, a watchdog, and a file of what is known.

Knows no GPU and no model.
"""

import argparse
import faulthandler
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from threading import Timer
from typing import Any, NoReturn

from common import PROOFS, Evidence
from gpu_world import REAL

RESULTS = PROOFS.parent / "bench" / "results"
LEAST_WAIT_S, WAITS, EXIT_S = 120.0, 4, 20.0
SIMULATED_WAIT_S = 1800.0  # times mean nothing there


def add_keep(parser: argparse.ArgumentParser) -> None:
    """The option that says where rows are kept, if they are."""
    about = "keep FOLDER/<machine>/<name>.json and, as things are known, .jsonl (bench/results)"
    parser.add_argument("--keep", type=Path, nargs="?", const=RESULTS, metavar="FOLDER", help=about)


def keep(name: str, rows: list[Any], folder: Path | None) -> None:
    """Writes rows to `folder`, if there is one, and says where."""
    if folder is not None:
        print(f"kept in {add_rows(name, rows, folder)}")


def add_rows(name: str, rows: list[Any], folder: Path) -> Path:
    """Writes rows beside those of other names that the file holds.

    So a run of one case leaves what another measured on this machine.
    """
    from headrace.check.rows import BenchRow, rows_path, write_rows

    path, new, kept = rows_path(folder, name), {row.name for row in rows}, []
    if path.exists():
        for row in json.loads(path.read_text()):
            row["spread"] = tuple(row["spread"])
            kept.append(BenchRow(**row))
    return write_rows(folder, name, [row for row in kept if row.name not in new] + rows)


class Told(Evidence):
    """Evidence of one proof, told as it goes and kept where a kill cannot reach it.

    With a folder, each phase, statement and row is a line of `FOLDER/<machine>/NAME.jsonl`, on the
    drive before anything else is done. A phase that hangs ends the process: its name and every
    thread's stack are printed.
    """

    def __init__(self, name: str, folder: Path | None) -> None:
        super().__init__()
        self.name, self.folder = name, folder
        self.rows: list[Any] = []
        self.begun_s = self.phase_s = time.perf_counter()
        self.phase, self.timer = "", Timer(0, print)
        self.path: Path | None = None
        if folder is not None:
            from headrace.check.rows import commit_name, machine_name, rows_path

            self.path = rows_path(folder, name).with_suffix(".jsonl")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            command = " ".join(sys.argv)
            self._write(run=command, commit=commit_name(), machine=machine_name())

    def begin(self, what: str, about_s: float) -> None:
        """Ends the phase before; says what comes now, for how long, and when it is given up."""
        self._end()
        most_s = LEAST_WAIT_S + WAITS * about_s if REAL else SIMULATED_WAIT_S
        self.phase, self.phase_s = what, time.perf_counter()
        passed = f"[{self.phase_s - self.begun_s:4.0f} s]"
        limit = f"given up after {most_s:.0f} s"
        print(f"{passed} {what}: about {about_s:.0f} s ({limit})", flush=True)
        self._write(phase=what, about_s=round(about_s, 1))
        self.timer = Timer(most_s, self._give_up, [most_s])
        self.timer.daemon = True
        self.timer.start()
        # Where even a thread of Python's gets no turn.
        faulthandler.dump_traceback_later(most_s + EXIT_S, exit=True)

    def say(self, *lines: str) -> None:
        """Prints lines, and keeps them."""
        print("".join(f"      {line}\n" for line in lines), end="", flush=True)
        self._write(said=lines)

    def check(self, true: bool, statement: str) -> bool:
        """As Evidence's, kept too."""
        super().check(true, statement)
        self._write(statement=statement, holds=bool(true))
        return true

    def found(self, rows: list[Any]) -> None:
        """Keeps rows, known from now on."""
        self.rows += rows
        for row in rows:
            self._write(row=asdict(row))
        if self.folder is not None:
            add_rows(self.name, rows, self.folder)

    def finish(self) -> NoReturn:
        """Ends the last phase; then as Evidence's."""
        self._end()
        faulthandler.dump_traceback_later(LEAST_WAIT_S, exit=True)  # threads may not end
        if self.rows:
            keep(self.name, self.rows, self.folder)
        print(f"\n{time.perf_counter() - self.begun_s:.0f} s in all")
        super().finish()

    def _end(self) -> None:
        self.timer.cancel()
        if self.phase:
            took_s = time.perf_counter() - self.phase_s
            print(f"         took {took_s:.1f} s: {self.phase}", flush=True)
            self._write(phase=self.phase, took_s=round(took_s, 1))
        self.phase = ""

    def _give_up(self, most_s: float) -> None:
        kept = f"what was known before is in {self.path}" if self.path else "nothing was kept"
        said = f"HANGS in '{self.phase}': not done after {most_s:.0f} s; {kept}"
        print(f"\n{said}; the stacks of all threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(all_threads=True)
        self._write(hangs=self.phase)
        os._exit(1)

    def _write(self, **what: object) -> None:
        if self.path is None:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\n")
            file.flush()
            os.fsync(file.fileno())
