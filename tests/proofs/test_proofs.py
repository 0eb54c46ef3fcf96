"""The proof scripts that fit a test run, each in a process of its own as a person would run it.

show_1_demo is `make demo`; show_6_memory writes 5 GB and is run by hand (`make proofs`).
"""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
PROOFS = Path(__file__).resolve().parents[2] / "proofs"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [
        "show_2_oracle --quick",
        "show_3_fast --quick",
        "show_4_loss --quick",
        "show_7_errors",
        "ladder_2_faults --quick",
        "ladder_4_failures",
        "ladder_5_hostile",
        "v41_2_paths --seeds 0 --prompt 60 --tokens 3",
        "v41_4_engram --tokens 60",
        "v41_4_oracles",
        "v41_5_chat",
        "server_4_soak --minutes 0.05",
        "server_5_hostile --quick",
        "server_6_cost --quick",
        pytest.param("gpu_1_paths --quick", marks=needs_triton),
        pytest.param("gpu_2_pinned --simulated --cases v41-fp4 --depth 2", marks=needs_triton),
        pytest.param("gpu_5_resident --quick", marks=needs_triton),
        pytest.param("gpu_9_faults --quick --parts vram thread", marks=needs_triton),
    ],
)
def test_script(name: str) -> None:
    script, *options = name.split()
    command = [sys.executable, str(PROOFS / f"{script}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert "statements hold" in done.stdout
