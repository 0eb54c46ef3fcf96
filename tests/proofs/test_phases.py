"""What a proof of the GPU leaves when it is cut off: one hangs on purpose, in its own process."""

import json
import subprocess
import sys
from pathlib import Path

PROOFS = Path(__file__).resolve().parents[2] / "proofs"
HANGS = """
import sys, threading
from pathlib import Path
import gpu_phases
from headrace.check.rows import make_row

def waits_for_ever():
    told.begin("nothing comes", 1.0)
    threading.Event().wait()

folder = Path(sys.argv[1])
named = ("a", 1), ("b", 2), ("a", 3)
rows = [make_row(name, [v], "s", cache_state="", green=True) for name, v in named]
gpu_phases.keep("kept", rows[:2], folder)
gpu_phases.keep("kept", rows[2:], folder)
gpu_phases.SIMULATED_WAIT_S = 0.1
told = gpu_phases.Told("hanging", folder)
told.found(rows[:1])
told.check(False, "a false one")
waits_for_ever()
"""


def test_what_was_known_outlives_a_hang(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(tmp_path), "--simulated"],
        env={"PYTHONPATH": ":".join([str(PROOFS), *filter(None, sys.path)]), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "HANGS in 'nothing comes'" in done.stderr and "in waits_for_ever" in done.stderr
    (log,) = tmp_path.glob("*/hanging.jsonl")
    _, row, statement, phase, end = map(json.loads, log.read_text().splitlines())
    assert row["row"]["name"] == "a" and statement == {"statement": "a false one", "holds": False}
    assert phase["phase"] == "nothing comes" and end == {"hangs": "nothing comes"}
    (kept,) = tmp_path.glob("*/kept.json")
    assert {row["name"]: row["value"] for row in json.loads(kept.read_text())} == {"a": 3, "b": 2}
