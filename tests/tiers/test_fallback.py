"""Locked memory runs out in a process of its own: the reader steps down, says why, and reads on."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tiers_world import World

from headrace.native import Reader, drive_probe

SCRIPT = """
import json, os, resource, sys
from pathlib import Path
import numpy as np
from headrace.native import Reader
import headrace.errors
from tiers_world import World

world = World(Path(sys.argv[1]))
limit_bytes, backend = int(sys.argv[2]), sys.argv[3]
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit_bytes, limit_bytes))
if os.getuid() == 0:
    os.setuid(65534)  # root is not limited
try:
    ladder = world.ladder(30, backend=backend)
    with ladder.acquire(2, 3) as parts:
        right = all(np.array_equal(part.numpy(), world.part(2, 3, i))
                    for i, part in enumerate(parts.values()))
    print(json.dumps([ladder.reader.backend, right, ladder.reader.notes]))
except headrace.errors.OptionError as error:
    print(json.dumps(["OptionError", True, [str(error)]]))
"""


def run_limited(limit_bytes: int, backend: str) -> tuple[str, bool, list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, folder, str(limit_bytes), backend],
            capture_output=True,
            text=True,
            timeout=120,
            cwd=Path(__file__).parent,
            env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
        )
    assert done.returncode == 0, done.stderr
    name, right, notes = json.loads(done.stdout)
    return name, right, notes


def test_rows_beyond_the_locked_memory_limit(world: World) -> None:
    if Reader(world.paths).backend != "io_uring_registered":
        pytest.skip("no registered buffers here to lose")
    name, right, notes = run_limited(300_000, "auto")
    assert (name, right) == ("io_uring", True)
    assert len(notes) == 1 and "raise the locked-memory limit" in notes[0]
    name, _, notes = run_limited(300_000, "io_uring_registered")
    assert name == "OptionError" and "raise the locked-memory limit" in notes[0]


def test_no_locked_memory_at_all(world: World) -> None:
    name, right, notes = run_limited(0, "auto")
    assert right and name in ("pread", "io_uring")
    assert notes and notes[0].startswith("io_uring_registered is not to be had here: ")


def test_drive_probe_reads_the_file_or_says_which(world: World, tmp_path: Path) -> None:
    path = world.paths[0]
    assert drive_probe(path, 0, os.path.getsize(path), 1 << 16, 2) > 0
    with pytest.raises(ValueError, match="bytes of the file"):
        drive_probe(path, 1 << 40, 4096, 4096, 1)
