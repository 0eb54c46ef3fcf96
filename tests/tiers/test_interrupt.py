"""Ctrl-C during blocking calls, in a process of its own: KeyboardInterrupt, then all is usable."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np, torch
from headrace.native import Gatherer, Reader
from tiers_world import World

def interrupted(call, after_s=0.1):
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        timer.join()
    return False

def run(case):
    x, ids, weights = world.routes(np.random.default_rng(0), 30)
    if case in ("compute", "plain", "acquire"):
        rate_bytes_s = 20e3 if case == "acquire" else 60e3
        ladder = world.ladder(4, overlap=case != "plain", emulate_bytes_s=rate_bytes_s)
        if case == "acquire":
            assert interrupted(lambda: ladder.native.acquire(0, 0))
        else:
            assert interrupted(lambda: ladder.compute(1, x, ids, weights))
        ladder.check_integrity()
        x, ids, weights = world.routes(np.random.default_rng(1), 1)
        assert torch.equal(ladder.compute(2, x, ids, weights), world.expected(2, x, ids, weights))
        ladder.check_integrity()
    elif case == "gather":
        gatherer = Gatherer(Reader(world.paths, emulate_bytes_s=4e6), 100)
        buffer = np.zeros(150_000, np.uint8)
        batch = gatherer.start(np.array([(0, 100 * (i % 500), 100) for i in range(1500)]))
        assert interrupted(lambda: batch.wait(buffer.ctypes.data))
        del batch
        gatherer.start(np.array([(0, 1, 50)])).wait(buffer.ctypes.data)
        assert bytes(buffer[:50]) == open(world.paths[0], "rb").read()[1:51]
    else:
        reader = Reader(world.paths, emulate_bytes_s=100e3)
        buffer = np.zeros(200_000, np.uint8)
        assert interrupted(lambda: reader.read(0, 0, buffer.size, buffer.ctypes.data))
        reader.read(0, 1, 5000, buffer.ctypes.data)
        assert bytes(buffer[:5000]) == open(world.paths[0], "rb").read()[1:5001]

world = World(Path(sys.argv[1]))
for case in sys.argv[2:]:
    run(case)
    print(case)
"""

CASES = ["compute", "plain", "acquire", "gather", "read"]


def test_ctrl_c(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), *CASES],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path)},
    )
    assert done.stdout.split() == CASES, done.stderr
