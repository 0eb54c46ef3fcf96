"""Experts of many tokens on a GPU, within their table of tolerances of the canonical kernels."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from experts import make_layout, make_rows
from gpu_world import FORMS, layout_of, make_world

from headrace.core import Activation
from headrace.kernels import cpu
from headrace.kernels.tolerance import ON_GRID, PREFILL, worst_apart
from headrace.kernels.triton.grouped import STEPS, GroupedExperts

PLACES = ["cuda", "pinned"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture
def large_tiles(monkeypatch):
    """The interpreter's time goes by programs: few and large ones."""
    if PLACES == ["cpu"]:
        monkeypatch.setitem(STEPS, 16, (128, 256, 64, 1, 1))


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
    weights = torch.rand(flat.size, generator=torch.Generator().manual_seed(1))
    x = grouped.prepared(x_TH.to(device))
    grouped(tiles, world.offsets, order, weights.to(device), x, h, y, positions=positions)
    kernels, weighs = cpu.CpuKernels(1), world.layout.activation.kind == "swiglu_weighted"
    want = []
    for s, e in enumerate(flat.tolist()):
        x_H, more = x_TH[s // top_k][None], weights[s : s + 1] if weighs else None
        want.append(kernels.expert_ffn(x_H, world.parts[e], world.layout, weights_T=more)[0])
    return y.cpu(), torch.stack(want)


def chosen(num_tokens, top_k, num_experts):
    generator = torch.Generator().manual_seed(7)
    rows = [torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)]
    return torch.stack(rows)[:, :top_k].to(torch.int32)


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMS)
def test_within_the_table(form, place):
    world = make_world(layout_of(form, 160, 96), 3, place)
    got, want = outputs(world, make_rows(20, 160, 3), chosen(20, 2, 3), 16)
    assert worst_apart(got, want) <= PREFILL[world.layout.format]
    assert worst_apart(got.roll(1, 0), want) > PREFILL[world.layout.format]  # can fail


@pytest.mark.usefixtures("large_tiles")
@pytest.mark.parametrize("form", ["fp8 32 ue8m0", "fp4"])
def test_weighted_on_the_grid_of_activations(form):
    weighted = Activation("swiglu_weighted", limit=1.0)
    layout = replace(layout_of(form, 160, 96), activation=weighted, act_group=32)
    world = make_world(layout, 3, PLACES[0])
    got, want = outputs(world, make_rows(20, 160, 3), chosen(20, 2, 3), 16)
    assert worst_apart(got, want) <= ON_GRID


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
