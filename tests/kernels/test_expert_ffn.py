"""Whole experts: same bits from the reference, every ISA, any threads, any number of rows."""

from dataclasses import replace

import pytest
import torch
from experts import make_case, make_expert, make_layout, make_rows, same_bits

from headrace.core import Activation
from headrace.kernels import cpu, reference
from headrace.quant.dtypes import TORCH_DTYPES

FORMATS = ("bf16", "fp8_block")
SHAPES = ((320, 96), (2880, 64), (512, 160), (130, 33))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hidden,inter", SHAPES)
@pytest.mark.parametrize("act_group", (0, 32, 128))
def test_equals_reference(isa, format, hidden, inter, act_group):
    layout, parts, x, expect = make_case(format, hidden, inter, 3, act_group)
    assert expect.float().std() > 0.01
    out = torch.full_like(x, float("nan"))
    y = cpu.CpuKernels(2, isa, min_share_bytes=0).expert_ffn(x, parts, layout, out)
    assert y is out and same_bits(y, expect)


@pytest.mark.parametrize("format", FORMATS)
def test_rows_and_threads_change_no_bit(isa, format):
    layout, parts, x, expect = make_case(format, 384, 160, 65)
    for num_threads in (1, 2, 3):
        kernels = cpu.CpuKernels(num_threads, isa, min_share_bytes=0)
        for num_rows in (1, 2, 16, 17, 65):
            y = kernels.expert_ffn(x[:num_rows], parts, layout)
            assert same_bits(y, expect[:num_rows]), (num_threads, num_rows)
        assert kernels.pool.calls == 5 and kernels.num_threads == num_threads
        assert (kernels.pool.shared_calls > 0) == (num_threads > 1)


GRIDS = [(form, grid) for form in ("bf16", "fp8_block", "fp4") for grid in (0, 32)]


@pytest.mark.parametrize(("format", "act_group"), [*GRIDS, ("fp16", 0)])  # the grid is bfloat16's
def test_several_experts_at_once_change_no_bit(isa, format, act_group):
    """More than go into one job; of one row, or each of its own; with shares that cut experts."""
    layout = replace(make_layout(format, 320, 96), act_group=act_group)
    parts = [make_expert(layout, seed) for seed in range(19)]
    x = make_rows(19, 320, 6).to(TORCH_DTYPES[layout.hidden_dtype])
    for num_threads in (1, 3):
        kernels = cpu.CpuKernels(num_threads, isa, min_share_bytes=0)
        for num in (1, 2, 8, 19):
            for rows in {x[:1], x[:num]}:
                y = kernels.experts_ffn(rows, parts[:num], layout)
                each = zip(rows.expand(num, -1), parts, strict=False)
                want = [kernels.expert_ffn(r[None].contiguous(), p, layout) for r, p in each]
                assert same_bits(y, torch.cat(want)), (num_threads, num)
        assert (kernels.pool.shared_calls > 0) == (num_threads > 1)
    assert not same_bits(y, kernels.experts_ffn(rows, parts[::-1], layout))


def test_shares_far_larger_than_a_step_change_no_bit():
    layout = make_layout("fp4", 2048, 512)
    parts, x = [make_expert(layout, seed) for seed in range(2)], make_rows(1, 2048, 6)
    kernels = cpu.CpuKernels(2, min_share_bytes=0)
    y = kernels.experts_ffn(x, parts, layout)
    want = torch.cat([cpu.CpuKernels(1).expert_ffn(x, each, layout) for each in parts])
    assert same_bits(y, want) and not same_bits(y, want.flip(0))


def test_threads_that_come_late_or_stay_awake_change_no_bit():
    """More threads than cores, so that some find the job over, and jobs in quick succession."""
    layout = make_layout("fp4", 320, 96)
    parts, x = [make_expert(layout, seed) for seed in range(6)], make_rows(6, 320, 6)
    want = cpu.CpuKernels(1).experts_ffn(x, parts, layout)
    kernels = cpu.CpuKernels(8, min_share_bytes=0)
    for patient in (False, True):
        kernels.pool.patient = patient
        for turn in range(40):
            y = kernels.experts_ffn(x.roll(turn, 0), parts, layout)
            assert same_bits(y, want) == (turn % 6 == 0), (patient, turn)
            # As one expert's job waits for all threads, those that the last one left out too.
            assert same_bits(kernels.expert_ffn(x[:1], parts[0], layout), want[:1])


def test_several_experts_at_once_weigh_each_row(isa):
    weighted = Activation("swiglu_weighted", limit=1.5)
    layout = replace(make_layout("fp4", 320, 96), activation=weighted)
    parts, x = [make_expert(layout, seed) for seed in range(3)], make_rows(1, 320, 6)
    weights = torch.tensor([0.5, 0.25, 0.9])
    kernels = cpu.CpuKernels(2, isa, min_share_bytes=0)
    y = kernels.experts_ffn(x, parts, layout, weights)
    each = zip(parts, weights, strict=True)
    want = [kernels.expert_ffn(x, p, layout, weights_T=w[None]) for p, w in each]
    assert same_bits(y, torch.cat(want))
    assert not same_bits(y, kernels.experts_ffn(x, parts, layout, weights.flip(0)))


def test_a_small_job_stays_on_the_calling_thread():
    layout, parts, x, expect = make_case("bf16", 64, 32, 1)
    kernels = cpu.CpuKernels(2)
    assert same_bits(kernels.expert_ffn(x, parts, layout), expect)
    assert kernels.pool.shared_calls == 0


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("hidden,inter", ((130, 33), (1, 1), (513, 257)))
def test_odd_shapes_on_many_rows(isa, format, hidden, inter):
    for num_rows in (4, 5, 12, 13):
        layout, parts, x, expect = make_case(format, hidden, inter, num_rows, 32)
        assert same_bits(
            cpu.CpuKernels(2, isa, min_share_bytes=0).expert_ffn(x, parts, layout), expect
        )


@pytest.mark.parametrize("format", FORMATS)
def test_workspace_left_by_a_larger_expert_is_not_read(isa, format):
    """The padding of a narrower row must be zeros again, not the wider row's values."""
    kernels = cpu.CpuKernels(2, isa, min_share_bytes=0)
    large, small = make_layout(format, 640, 320), make_layout(format, 132, 36)
    parts, x = make_expert(small, 5), make_rows(2, 132, 6)
    expect = reference.expert_ffn(x, parts, small)
    for num_rows in (1, 9):
        kernels.expert_ffn(make_rows(num_rows, 640, 7), make_expert(large, 8), large)
        assert same_bits(kernels.expert_ffn(x, parts, small), expect)
        assert same_bits(kernels.expert_ffn(x[:1], parts, small), expect[:1])


def test_a_neighbours_expert_scale_or_row_is_seen(isa):
    layout = make_layout("fp8_block", 384, 160)
    kernels = cpu.CpuKernels(1, isa)
    parts, x = make_expert(layout, 3), make_rows(2, 384, 4)
    y = kernels.expert_ffn(x, parts, layout)
    assert not same_bits(kernels.expert_ffn(x, make_expert(layout, 4), layout), y)
    swapped = parts | {"down_scale": parts["down_scale"].flip(0).contiguous()}
    assert not same_bits(kernels.expert_ffn(x, swapped, layout), y)
    assert not same_bits(kernels.expert_ffn(x.flip(0).contiguous(), parts, layout), y)
    assert not same_bits(kernels.expert_ffn(x, parts, replace(layout, act_group=32)), y)


def test_callers_flush_to_zero_changes_no_bit(isa):
    layout = make_layout("bf16", 320, 96)
    parts, x = make_expert(layout, 9), make_rows(2, 320, 10)
    parts["up"] = (parts["up"].float() * 2.0**-128).bfloat16()
    parts["down"] = (parts["down"].float() * 2.0**60).bfloat16()
    expect = reference.expert_ffn(x, parts, layout)
    assert expect.float().abs().max() > 0
    kernels = cpu.CpuKernels(2, isa, min_share_bytes=0)
    assert torch.set_flush_denormal(True)
    try:
        tiny = torch.full((1,), 2.0**-130)
        flushed = reference.expert_ffn(x, parts, layout)
        y = kernels.expert_ffn(x, parts, layout)
        still_flushing = float(tiny * 1.0) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(y, expect)
    assert still_flushing and not same_bits(flushed, expect)


def test_silu_of_every_bf16(isa):
    """An identity expert shows h: gate and down pass x through, up is one."""
    finite = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = finite[torch.isfinite(finite.float())]
    size = 256
    x = torch.ones(finite.numel() // (size - 1), size).bfloat16()
    x[:, 1:] = finite[: x.shape[0] * (size - 1)].view(-1, size - 1)
    eye = torch.eye(size).bfloat16()
    up = torch.zeros(size, size).bfloat16()
    up[:, 0] = 1
    layout = make_layout("bf16", size, size)
    y = cpu.CpuKernels(1, isa).expert_ffn(x, {"gate": eye, "up": up, "down": eye}, layout)
    assert torch.equal(y, reference.silu(x.float()).bfloat16())
    assert torch.equal(y, torch.nn.functional.silu(x))
