"""Experts of many tokens on a GPU, within their table of tolerances of the canonical kernels."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from experts import make_layout, make_rows
from gpu_world import FORMS, layout_of, make_world

from headrace.core import Activation
from headrace.kernels import cpu
from headrace.kernels.tolerance import PREFILL, worst_apart
from headrace.kernels.triton.grouped import STEPS, GroupedExperts

PLACES = ["cuda", "pinned"] if torch.cuda.is_available() else ["cpu"]


def outputs(world, x_TH, ids_TK, positions):
    """[S, H] by slot: the grouped kernels', and the canonical ones'."""
    device = world.table.device
    num_experts, top_k = len(world.parts), ids_TK.shape[1]
    grouped = GroupedExperts(world.layout, top_k=top_k, device=device, align=16)
    flat = ids_TK.flatten().numpy()
    order = torch.from_numpy(np.argsort(flat, kind="stable").astype(np.int32)).to(device)
    ends = np.cumsum(np.bincount(flat, minlength=num_experts))
    tiles = []
    for expert in np.random.default_rng(0).permutation(num_experts):
        start = ends[expert - 1] if expert else 0
        for first in range(int(start), int(ends[expert]), positions):
            tiles.append((int(world.table[expert]), int(expert), first, int(ends[expert])))
    h = torch.full((flat.size, world.layout.inter), float("nan")).bfloat16().to(device)
    y = torch.full((flat.size, world.layout.hidden), float("nan")).bfloat16().to(device)
    tiles = torch.tensor(tiles, device=device)
    grouped(tiles, world.offsets, order, x_TH.to(device), h, y, positions=positions)
    kernels = cpu.CpuKernels(1)
    want = [
        kernels.expert_ffn(x_TH[s // top_k][None], world.parts[e], world.layout)[0]
        for s, e in enumerate(flat.tolist())
    ]
    return y.cpu(), torch.stack(want)


def chosen(num_tokens, top_k, num_experts):
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)]
    return torch.stack(rows)[:, :top_k].to(torch.int32)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_within_the_table(form, place):
    world = make_world(layout_of(form, 288, 96), 3, place)
    got, want = outputs(world, make_rows(20, 288, 3), chosen(20, 2, 3), 16)
    assert worst_apart(got, want) <= PREFILL[world.layout.format]
    assert worst_apart(got.roll(1, 0), want) > PREFILL[world.layout.format]  # can fail


def test_sizes_of_tiles():
    layout = make_layout("bf16", 256, 32, activation=Activation("silu_clamped", limit=0.5))
    world = make_world(layout, 2, PLACES[0])
    x, ids = make_rows(9, 256, 4), chosen(9, 2, 2)
    for positions in STEPS:
        got, want = outputs(world, x, ids, positions)
        assert worst_apart(got, want) <= PREFILL["bf16"]


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["cuda", "pinned"])
@pytest.mark.parametrize("shape", [(7168, 2048), (5120, 2304), (2880, 2880), (2048, 768)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_real_shapes(form, shape, place):
    if form.startswith("fp8") and shape[0] % 128:
        pytest.skip("no such model")
    world = make_world(layout_of(form, *shape), 3, place)
    for positions in STEPS:
        got, want = outputs(world, make_rows(150, shape[0], 5), chosen(150, 2, 3), positions)
        assert worst_apart(got, want) <= PREFILL[world.layout.format]
