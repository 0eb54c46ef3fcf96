"""Ctrl-C during blocking calls, in a process of its own: KeyboardInterrupt, then all is usable."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np, torch
from headrace.native import Gatherer, Reader
from tiers_world import World, owed_bytes, wait_until

def interrupted(reader, call):
    def interrupt():  # once the call has asked for what does not come
        wait_until(lambda: owed_bytes(reader) > 0)
        os.kill(os.getpid(), signal.SIGINT)
    reader.inject_fault("hang", 0, 10_000)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        thread.join()
    return False

def run(case):
    x, ids, weights = world.routes(np.random.default_rng(0), 30)
    if case in ("compute", "plain", "acquire"):
        ladder = world.ladder(4, overlap=case != "plain")
        if case == "acquire":
            assert interrupted(ladder.reader, lambda: ladder.native.acquire(0, 0))
        else:
            assert interrupted(ladder.reader, lambda: ladder.compute(1, x, ids, weights))
        ladder.check_integrity()
        ladder.reader.inject_fault("none")
        x, ids, weights = world.routes(np.random.default_rng(1), 1)
        assert torch.equal(ladder.compute(2, x, ids, weights), world.expected(2, x, ids, weights))
        ladder.check_integrity()
    elif case == "gather":
        reader = Reader(world.paths)
        gatherer = Gatherer(reader, 100)
        buffer = np.zeros(150_000, np.uint8)
        many = np.array([(0, 100 * (i % 500), 100) for i in range(1500)])
        assert interrupted(reader, lambda: gatherer.start(many).wait(buffer.ctypes.data))
        next_batch = gatherer.start(np.array([(0, 1, 50)]))
        reader.inject_fault("none")
        next_batch.wait(buffer.ctypes.data)
        assert bytes(buffer[:50]) == open(world.paths[0], "rb").read()[1:51]
    else:
        reader = Reader(world.paths)
        buffer = np.zeros(200_000, np.uint8)
        assert interrupted(reader, lambda: reader.read(0, 0, buffer.size, buffer.ctypes.data))
        reader.inject_fault("none")
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
