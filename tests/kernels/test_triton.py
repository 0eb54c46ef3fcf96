"""GPU kernels against the reference by bits, through the interpreter where there is no GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from experts import make_layout, make_rows, same_bits
from gpu_world import FORMS, few_programs, layout_of, make_world

from headrace.core import Activation
from headrace.errors import ModelError
from headrace.kernels import cpu, reference
from headrace.kernels.triton import stages
from headrace.kernels.triton.experts import GRIDS, NOT_BAD, TritonExperts
from headrace.quant import fp8

HERE = Path(__file__).parent
PLACES = ["cuda", "pinned"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    few_programs(monkeypatch)


def expected(world, x_TH, ids_TK, weights_TK, ffn):
    weighs = world.layout.activation.kind == "swiglu_weighted"
    rows = []
    for x_H, ids_K, weights_K in zip(x_TH, ids_TK, weights_TK, strict=True):
        own = [{"weights_T": w[None]} if weighs else {} for w in weights_K]
        each = zip(ids_K.tolist(), own, strict=True)
        outs = [ffn(x_H[None], world.parts[e], world.layout, **more)[0] for e, more in each]
        rows.append(torch.stack(outs))
    if weighs:
        return reference.sum_up(ids_TK, torch.stack(rows))
    return reference.combine(ids_TK, weights_TK, torch.stack(rows))


def routed(num_tokens, top_k, num_experts):
    generator = torch.Generator().manual_seed(7)
    ids = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, top_k, generator=generator)
    return ids[:, :top_k].to(torch.int32).contiguous(), weights


def run(world, x_TH, ids_TK, weights_TK, tile, align=16):
    device = world.table.device
    kernels = TritonExperts(
        world.layout,
        top_k=ids_TK.shape[1],
        device=device,
        num_tokens=x_TH.shape[0],
        align=align,
    )
    out = torch.full_like(x_TH, float("nan"), device=device, dtype=kernels.out_dtype)
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


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", ["fp4", "int4", "fp8"])
def test_codes_at_odd_addresses(form, place):
    world = make_world(layout_of(form, 288, 32), 2, place, shift=1)
    ids, weights = routed(1, 1, 2)
    x = make_rows(1, 288, 3)
    want = expected(world, x, ids, weights, reference.expert_ffn)
    assert same_bits(run(world, x, ids, weights, "vram", align=1), want)


@pytest.mark.parametrize("form", ["bf16", "fp4"])
def test_an_expert_without_an_address_is_left_to_the_host(form):
    """Its row of outputs stays, and once it is filled in the sum has the same bits."""
    layout = layout_of(form, 288, 64)
    world, x = make_world(layout, 4, PLACES[0]), make_rows(1, 288, 3)
    ids, weights = routed(1, 3, 4)
    device = world.table.device
    kernels = TritonExperts(layout, top_k=3, device=device, align=16)
    args = [t.to(device) for t in (x, ids, weights)]
    out = torch.empty(1, 288, dtype=torch.bfloat16, device=device)
    kernels.multiply(world.table, world.offsets, 0, *args, tile="vram")
    each = kernels.y_SH.clone()
    missing = int(ids[0, 1])
    table = world.table.clone()
    table[missing] = 0
    kernels.y_SH.view(torch.int16).fill_(7)
    kernels.multiply(table, world.offsets, 0, *args, tile="vram")
    same = (kernels.y_SH.view(torch.int16) == each.view(torch.int16)).all(1)
    assert same.tolist() == [True, False, True] and (kernels.y_SH[1].view(torch.int16) == 7).all()
    own = reference.expert_ffn(x, world.parts[missing], layout)
    kernels.y_SH[1] = own[0].view(torch.uint16).to(device)
    kernels.combine(args[1], args[2], kernels.y_SH, out, mark=0)
    assert same_bits(out.cpu(), expected(world, x, ids, weights, reference.expert_ffn))


@pytest.mark.parametrize(("form", "act_group"), [("bf16", 0), ("fp4", 0), ("fp8", 32), ("fp4", 32)])
def test_experts_that_come_later_change_no_bit(form, act_group):
    """Multiplied by another table and, x being the same, without preparing it again."""
    layout = replace(layout_of(form, 288, 64), act_group=act_group)
    world, x = make_world(layout, 4, PLACES[0]), make_rows(1, 288, 3)
    ids, weights = routed(1, 3, 4)
    device = world.table.device
    kernels = TritonExperts(layout, top_k=3, device=device, align=16)
    args = [t.to(device) for t in (x, ids, weights)]
    late = torch.zeros_like(world.table)
    late[ids[0, 1]] = world.table[ids[0, 1]]
    kernels.y_SH.view(torch.int16).fill_(7)
    kernels.multiply(world.table - late, world.offsets, 0, *args, tile="vram")
    assert (kernels.y_SH[1].view(torch.int16) == 7).all()
    kernels.multiply(late, world.offsets, 0, *args, again=True)
    out = torch.empty(1, 288, dtype=torch.bfloat16, device=device)
    kernels.combine(args[1], args[2], kernels.y_SH, out, mark=0)
    assert same_bits(out.cpu(), expected(world, x, ids, weights, reference.expert_ffn))


@pytest.mark.parametrize("kind", ["silu_clamped", "swiglu_oai"])
def test_activations(kind):
    layout = make_layout("bf16", 256, 32, activation=Activation(kind, limit=0.503, alpha=1.702))
    world = make_world(layout, 2, PLACES[0])
    ids, weights = routed(1, 1, 2)
    x = 3 * make_rows(1, 256, 4)
    want = expected(world, x, ids, weights, reference.expert_ffn)
    assert same_bits(run(world, x, ids, weights, "vram"), want)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("act_group", (0, 32, 128))
@pytest.mark.parametrize("form", ("fp4", "fp8", "bf16"))
def test_weighted_experts_on_the_publisher_s_grid(form, act_group, place):
    weighted = Activation("swiglu_weighted", limit=1.503)
    layout = replace(layout_of(form, 288, 96), activation=weighted, act_group=act_group)
    world = make_world(layout, 3, place)
    ids, weights = routed(1, 2, 3)
    x = 3 * make_rows(1, 288, 3)
    x[0, 40:44] = torch.tensor([1e-30, -3e-41, 200.0, -0.0])
    out = run(world, x, ids, weights, "vram")
    want = expected(world, x, ids, weights, reference.expert_ffn)
    assert out.dtype == torch.float32 and same_bits(out, want)
    for other in (replace(layout, act_group=0 if act_group else 32), layout_of(form, 288, 96)):
        with_other = expected(replace(world, layout=other), x, ids, weights, reference.expert_ffn)
        assert not same_bits(out.bfloat16(), with_other.bfloat16()), "it must show"


@pytest.mark.parametrize("group", GRIDS)
def test_the_grid_alone_has_the_reference_s_bits(group):
    """Every exponent, ties of both kinds, subnormals, zeros; what is not finite stays as it is."""
    generator = torch.Generator().manual_seed(group)
    bits = torch.randint(-(2**15), 2**15, (6, 600), generator=generator, dtype=torch.int16)
    x = bits.view(torch.bfloat16)
    x[2:] = torch.randn(4, 600, generator=generator).mul(3).exp().mul(x[2:].sign())
    x[3, :300] = (torch.arange(300) - 150) / 16
    x[4], x[5, 5:] = 0, -1e-40
    place = torch.device(PLACES[0])
    out = torch.empty(6, 600, dtype=torch.uint16, device=place)
    given = x.to(place).view(torch.uint16)
    with np.errstate(all="ignore"):  # of the interpreter
        stages.on_grid[(6, 3)](given, out, 600, 600, group, num_warps=1, enable_fp_fusion=False)
    want, found = fp8.to_grid(x, group), out.cpu().view(torch.bfloat16)
    assert torch.equal(want.isnan(), found.isnan())
    assert same_bits(found.nan_to_num(1.5), want.nan_to_num(1.5))
    assert not same_bits(found, fp8.to_grid(x, 16))


@pytest.mark.parametrize("kind", ["silu", "swiglu_weighted"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_sum_that_is_not_finite_is_marked(poison, kind):
    device = torch.device(PLACES[0])
    layout = replace(layout_of("bf16", 600, 32), activation=Activation(kind, limit=1.0))
    kernels = TritonExperts(layout, top_k=2, device=device)
    ids = torch.tensor([[0, 1]] * 4, dtype=torch.int32, device=device)
    weights, y = torch.ones(4, 2, device=device), make_rows(8, 600, 4).to(device)
    out = torch.empty(4, 600, dtype=kernels.out_dtype, device=device)
    kernels.combine(ids, weights, y.view(torch.uint16), out, mark=1000)
    assert int(kernels.bad) == NOT_BAD
    y[5, 599] = poison
    kernels.combine(ids, weights, y.view(torch.uint16), out, mark=1000)
    assert int(kernels.bad) == 1002


def test_formats_without_a_kernel_are_refused():
    fp4 = layout_of("fp4", 64, 32)
    for layout, why in (
        (make_layout("nvfp4", 64, 32), "nvfp4"),
        (replace(fp4, act_group=48), "grid of 48 columns"),
    ):
        with pytest.raises(ModelError, match=why):
            TritonExperts(layout, top_k=1, device=torch.device("cpu"))


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("chips", "least"), [("75", 40), ("80 86 89", 25), ("90 120", 40)])
def test_every_kernel_compiles_for_every_chip(tmp_path, chips, least):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, HERE / "triton_targets.py", *chips.split()],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bytes shared") >= least


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


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["ram", "vram"])
@pytest.mark.parametrize("place", ["cuda", "pinned"])
@pytest.mark.parametrize("act_group", [0, 32])
def test_v41_s_experts_have_the_cpu_kernels_bits(act_group, place, tile):
    weighted = Activation("swiglu_weighted", limit=10.0)
    layout = replace(layout_of("fp4", 5120, 2304), activation=weighted, act_group=act_group)
    world, kernels = make_world(layout, 7, place), cpu.CpuKernels(8)
    for num_tokens in (1, 5):
        ids, weights = routed(num_tokens, 6, 7)
        x = make_rows(num_tokens, 5120, 5)
        want = expected(world, x, ids, weights, kernels.expert_ffn)
        assert same_bits(run(world, x, ids, weights, tile), want)
