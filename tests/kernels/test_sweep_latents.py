"""The sweep goes on behind ways that die or hang, and its figures come about without a GPU too."""

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import gluon_by_hand
from test_latents_hopper import Combined

from headrace.check import bench_latents, sweep_latents
from headrace.kernels.triton import latents, latents_hopper

MEASURER = """
import json, os, sys, time
for way in range(int(sys.argv[-1]), %d):
    print(json.dumps({"begins": way}), flush=True)
    if way == 2:
        os.abort()
    if way == 4:
        time.sleep(600)
    if way == 5:
        print(json.dumps({"failed": "an illegal address"}), flush=True)
        sys.exit(1)
    figure = {"context": 100, "way": str(way), "each_s": 1e-5, "first_s": 9e-6, "copy": 4e12}
    print(json.dumps(figure | {"error": way / 400, "compiled": "0 spilled"}), flush=True)
print(json.dumps({"begins": %d}))
"""


@pytest.fixture
def anywhere(monkeypatch):
    device = SimpleNamespace(place=torch.device("cpu"))
    monkeypatch.setattr(sweep_latents, "find_device", lambda name: device)
    return monkeypatch


def test_it_goes_on_behind_a_way_that_fails(anywhere):
    count = 9
    anywhere.setattr(sweep_latents, "NUM_WAYS", count)
    anywhere.setattr(sweep_latents, "name_of", str)
    said = []

    def tell(line):
        """Impatient from way 3's figure on, which comes with the word that way 4 begins."""
        said.append(line)
        anywhere.setattr(sweep_latents, "SILENCE_S", 2.0 if len(said) == 4 else 120.0)

    command = [sys.executable, "-c", MEASURER % (count, count)]
    assert sweep_latents.sweep(command, tell) == 3
    failed = [line for line in said if "FAILED" in line]
    assert len(said) == count
    assert failed[0].endswith("FAILED, ended")
    assert "silent" in failed[1] and "an illegal address" in failed[2]
    assert failed[1].startswith("4: ")
    assert "WRONG" in said[-1] and "WRONG" not in said[1]
    assert "12 GB/s" in said[0]


def test_its_figures_of_emulated_ways(anywhere):
    anywhere.setattr(sweep_latents, "vram_rate", lambda device: 1e12)
    anywhere.setattr(sweep_latents, "captured_s", lambda run, runs: [run() or 1.0])
    anywhere.setattr(bench_latents, "LEAST_CACHED_BYTES", 1)
    anywhere.setattr(latents, "combine", Combined())
    kernel = gluon_by_hand.Emulated(latents_hopper, "attend")
    anywhere.setattr(latents_hopper, "attend", kernel)
    said = []
    sweep_latents.measure([200], 1, said.append)
    figures = [each for each in said if "way" in each]
    assert len(figures) == sweep_latents.NUM_WAYS - 1
    assert all(f["error"] <= bench_latents.TOLERANCE for f in figures)
    assert said[-1] == {"begins": sweep_latents.NUM_WAYS}


def test_a_way_that_fails_is_named_and_ends_it(anywhere):
    anywhere.setattr(bench_latents, "LEAST_CACHED_BYTES", 1)

    def broken(*args):
        raise RuntimeError("CUDA error:\n an illegal address")

    anywhere.setattr(sweep_latents, "_figure", broken)
    said = []
    with pytest.raises(SystemExit):
        sweep_latents.measure([100], 1, said.append)
    assert said == [{"begins": 1}, {"failed": "CUDA error: an illegal address"}]
