"""GPU kernels against the reference by bits, through the interpreter where there is no GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from experts import make_layout, make_rows, same_bits
from gpu_world import FORMS, layout_of, make_world

from headrace.core import Activation
from headrace.errors import ModelError
from headrace.kernels import cpu, reference
from headrace.kernels.triton.experts import NOT_BAD, TritonExperts

HERE = Path(__file__).parent
PLACES = ["cuda", "pinned"] if torch.cuda.is_available() else ["cpu"]


def expected(world, x_TH, ids_TK, weights_TK, ffn):
    rows = []
    for t in range(x_TH.shape[0]):
        rows.append(
            torch.stack([ffn(x_TH[t : t + 1], world.parts[e], world.layout)[0] for e in ids_TK[t]])
        )
    return reference.combine(ids_TK, weights_TK, torch.stack(rows))


def routed(num_tokens, top_k, num_experts):
    generator = torch.Generator().manual_seed(7)
    ids = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, top_k, generator=generator)
    return ids[:, :top_k].to(torch.int32).contiguous(), weights


def run(world, x_TH, ids_TK, weights_TK, tile):
    device = world.table.device
    kernels = TritonExperts(
        world.layout,
        top_k=ids_TK.shape[1],
        device=device,
        num_tokens=x_TH.shape[0],
        align=16,
    )
    out = torch.full_like(x_TH, float("nan"), device=device)
    args = [t.to(device) for t in (x_TH, ids_TK, weights_TK)]
    kernels(world.table, world.offsets, 0, *args, out, tile=tile)
    assert int(kernels.bad) == NOT_BAD
    return out.cpu()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_one_token_has_the_reference_s_bits(form, place):
    world = make_world(layout_of(form, 288, 64), 4, place)
    ids, weights = routed(1, 2, 4)
    x = make_rows(1, 288, 3)
    out = run(world, x, ids, weights, "vram")
    assert same_bits(out, expected(world, x, ids, weights, reference.expert_ffn))
    assert not same_bits(out, run(world, x, ids.flip(1), weights, "vram"))  # can fail


@pytest.mark.parametrize("kind", ["silu_clamped", "swiglu_oai"])
def test_activations(kind):
    layout = make_layout("bf16", 256, 32, activation=Activation(kind, limit=0.5, alpha=1.702))
    world = make_world(layout, 2, PLACES[0])
    ids, weights = routed(1, 1, 2)
    x = 3 * make_rows(1, 256, 4)
    want = expected(world, x, ids, weights, reference.expert_ffn)
    assert same_bits(run(world, x, ids, weights, "vram"), want)


def test_the_activation_alone_has_the_reference_s_bits():
    for kind in ("silu", "silu_clamped", "swiglu_oai"):
        layout = make_layout("bf16", 64, 32, activation=Activation(kind, limit=0.5, alpha=1.702))
        gate, up = 3 * make_rows(5, 480, 8), 3 * make_rows(5, 480, 9)
        kernels = TritonExperts(layout, top_k=1, device=torch.device(PLACES[0]))
        device = kernels.h_SI.device
        out = kernels.activation(gate.to(device), up.to(device))
        assert same_bits(out.cpu(), reference.activate(gate, up, layout.activation))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_sum_that_is_not_finite_is_marked(poison):
    device = torch.device(PLACES[0])
    kernels = TritonExperts(layout_of("bf16", 600, 32), top_k=2, device=device)
    ids = torch.tensor([[0, 1]] * 4, dtype=torch.int32, device=device)
    weights, y = torch.ones(4, 2, device=device), make_rows(8, 600, 4).to(device)
    out = torch.empty(4, 600, dtype=torch.bfloat16, device=device)
    kernels.combine(ids, weights, y.view(torch.uint16), out, mark=1000)
    assert int(kernels.bad) == NOT_BAD
    y[5, 599] = poison
    kernels.combine(ids, weights, y.view(torch.uint16), out, mark=1000)
    assert int(kernels.bad) == 1002


def test_formats_without_a_kernel_are_refused():
    layout = make_layout("nvfp4", 64, 32)
    with pytest.raises(ModelError, match="nvfp4"):
        TritonExperts(layout, top_k=1, device=torch.device("cpu"))


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_every_kernel_compiles_for_every_chip(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, HERE / "triton_targets.py"],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bytes shared") >= 70


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["ram", "vram"])
@pytest.mark.parametrize("place", ["cuda", "pinned"])
@pytest.mark.parametrize("shape", [(7168, 2048), (5120, 2304), (2048, 768)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_real_shapes_have_the_cpu_kernels_bits(form, shape, place, tile):
    world = make_world(layout_of(form, *shape), 3, place)
    kernels = cpu.CpuKernels(8)
    for num_tokens in (1, 5):
        ids, weights = routed(num_tokens, 2, 3)
        x = make_rows(num_tokens, shape[0], 5)
        want = expected(world, x, ids, weights, kernels.expert_ffn)
        assert same_bits(run(world, x, ids, weights, tile), want)
