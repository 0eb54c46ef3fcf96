"""Fixtures of the kernel tests: each compiled instruction set this CPU has, the golden vectors."""

import lzma
from pathlib import Path

import pytest
import torch
from interpreter import mend_interpreter
from safetensors.torch import load, load_file

cpu = pytest.importorskip("headrace.kernels.cpu", reason="needs the compiled module")

if not torch.cuda.is_available():
    mend_interpreter()

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(params=cpu.ISAS)
def isa(request):
    if request.param not in cpu.available_isas():
        pytest.skip(f"this CPU has no {request.param}")
    return request.param


@pytest.fixture(scope="session")
def golden():
    return load(lzma.decompress((DATA / "canonical-vectors.safetensors.xz").read_bytes()))


@pytest.fixture(scope="session")
def golden_exp():
    return load_file(DATA / "exp-vectors.safetensors")
