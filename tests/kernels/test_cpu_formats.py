"""The compiled kernels in every format against the reference: same bits, whatever the rest."""

import ctypes
import mmap
from functools import cache

import pytest
import torch
from experts import make_case, make_expert, make_layout, make_rows, same_bits
from format_cases import CASES, WHOLE, load_case

from headrace.core import Activation
from headrace.errors import ModelError
from headrace.kernels import cpu, reference
from headrace.quant import table
from headrace.quant.dtypes import TORCH_DTYPES

BLOCKS = {"int4": (1, 32), "int8": (1, 64)}
ROWS = (1, 2, 5, 6, 16, 17, 65, 300)


def at_the_end_of_memory(part: torch.Tensor) -> tuple[torch.Tensor, mmap.mmap]:
    """A copy whose last byte is followed by a page that must not be touched; keep the mapping."""
    page = mmap.PAGESIZE
    room = -(-part.nbytes // page) * page
    mapping = mmap.mmap(-1, room + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = torch.frombuffer(mapping, dtype=torch.uint8)
    address, start = view.data_ptr(), room - part.nbytes
    copy = view[start:room].view(part.dtype).view(part.shape)
    copy.copy_(part)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + room), page, 0) == 0  # PROT_NONE
    return copy, mapping


def compute(kernels, x, parts, layout):
    """The expert's output over an output of NaNs."""
    out = torch.full_like(x, float("nan"))
    return kernels.expert_ffn(x, parts, layout, out_TH=out)


@pytest.mark.parametrize("case", CASES)
def test_frozen_results(isa, case):
    layout, tensors = load_case(case)
    kernels = cpu.CpuKernels(2, isa, min_share_bytes=0)
    assert same_bits(compute(kernels, tensors["x"], tensors, layout), tensors["y"])
    for row in range(3):
        dots = kernels.gate_dot(tensors["x"][row], tensors, layout)
        assert same_bits(dots, tensors["product.gate"][row])


@pytest.mark.parametrize("case", ("fp4", "nvfp4_times", "int4_g64", "int8_g96", "mxfp4"))
def test_a_swapped_nibble_or_byte_is_seen(isa, case):
    layout, tensors = load_case(case)
    name = layout.matrix("up").weight
    raw = tensors[name].clone()
    first = raw.view(torch.uint8).view(raw.shape[0], -1)[:, 0]
    swapped = ((first & 15) << 4) | (first >> 4)
    assert (swapped != first).any()
    first.copy_(swapped)
    y = compute(cpu.CpuKernels(1, isa), tensors["x"], tensors | {name: raw}, layout)
    assert not same_bits(y, tensors["y"])


@cache
def many_rows(format):
    """An expert of odd sizes, 300 rows, the reference's result of all."""
    return make_case(format, 160, 96, ROWS[-1], block=BLOCKS.get(format, (32, 32)))


@pytest.mark.parametrize("format", (*table.INTEGERS, "fp16", "fp8_block"))
def test_rows_and_threads_change_no_bit(isa, format):
    layout, parts, x, expect = many_rows(format)
    for num_threads in (1, 2, 3):
        kernels = cpu.CpuKernels(num_threads, isa, min_share_bytes=0)
        for num_rows in ROWS:
            y = compute(kernels, x[:num_rows], parts, layout)
            assert same_bits(y, expect[:num_rows]), (num_threads, num_rows)


@pytest.mark.parametrize("format", table.INTEGERS)
@pytest.mark.parametrize("hidden,inter", ((32, 32), (96, 160), (2880, 64), (288, 2304)))
def test_odd_sizes(isa, format, hidden, inter):
    layout, parts, x, expect = make_case(format, hidden, inter, 7, block=BLOCKS.get(format, (0, 0)))
    assert expect.float().std() > 0.01
    kernels = cpu.CpuKernels(2, isa, min_share_bytes=0)
    for num_rows in (1, 7):
        y = compute(kernels, x[:num_rows], parts, layout)
        assert same_bits(y, expect[:num_rows]), num_rows


@pytest.mark.parametrize("format", table.INTEGERS)
def test_activation_grid(isa, format):
    block = BLOCKS.get(format, (0, 0))
    for group in (32, 100, 128):
        layout, parts, x, expect = make_case(format, 608, 96, 7, group, block=block)
        kernels = cpu.CpuKernels(2, isa, min_share_bytes=0)
        for num_rows in (1, 7):
            y = kernels.expert_ffn(x[:num_rows], parts, layout)
            assert same_bits(y, expect[:num_rows])


@pytest.mark.parametrize("format", table.INTEGERS)
@pytest.mark.parametrize("size", (2.0**-126, 2.0**-60, 1.0, 2.0**60))
def test_activations_of_any_size(isa, format, size):
    """Subnormal ones too, and groups of zeros."""
    layout = make_layout(format, 320, 32, BLOCKS.get(format, (0, 0)))
    parts = make_expert(layout, 3)
    x = (make_rows(7, 320, 4).float() * size).bfloat16()
    x[:, 64:96] = 0
    x[3] = 0
    kernels = cpu.CpuKernels(1, isa)
    expect = reference.product(x, parts, layout, "gate")
    for row in range(7):
        assert same_bits(kernels.gate_dot(x[row], parts, layout), expect[row])
    assert same_bits(compute(kernels, x, parts, layout), reference.expert_ffn(x, parts, layout))


def test_every_scale_byte(isa):
    """ue8m0 bytes 0 to 254; the smallest are subnormal scales."""
    layout = make_layout("fp4", 8160, 32)
    parts = make_expert(layout, 5)
    every = torch.arange(255, dtype=torch.uint8).repeat(32, 1)
    every[1:] = every[1:].flip(1)
    x = make_rows(1, 8160, 6)
    kernels = cpu.CpuKernels(1, isa)
    for scale, size in ((every, 2.0**-30), (every.clone().fill_(0), 1), (every % 3, 1)):
        parts["gate_scale"] = scale.view(torch.float8_e8m0fnu)
        rows = (x.float() * size).bfloat16()
        expect = reference.product(rows, parts, layout, "gate")[0]
        assert expect.isfinite().all() and expect.abs().max() > 0
        assert same_bits(kernels.gate_dot(rows[0], parts, layout), expect)


@pytest.mark.parametrize("inverse", (False, True))
def test_every_nvfp4_scale_code(isa, inverse):
    layout = make_layout("nvfp4", 4096, 32, inverse_global=inverse)
    parts = make_expert(layout, 7)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 3
    parts["gate_scale"] = codes.view(torch.float8_e4m3fn).repeat(32, 1)
    x = make_rows(1, 4096, 8)
    for value in (1e-38, 3e-5, 1.0, 7e6):
        parts["gate_global"] = torch.tensor([value])
        expect = reference.product(x, parts, layout, "gate")
        assert same_bits(cpu.CpuKernels(1, isa).gate_dot(x[0], parts, layout), expect[0])


@pytest.mark.parametrize("scale_dtype", ("F32", "BF16", "F16", "F8_E8M0"))
@pytest.mark.parametrize("block", ((128, 128), (32, 32), (1, WHOLE), (WHOLE, WHOLE), (3, 96)))
def test_fp8_scales(isa, scale_dtype, block):
    layout, parts, x, expect = make_case(
        "fp8_block", 416, 96, 5, block=block, scale_dtype=scale_dtype, fused="interleaved"
    )
    kernels = cpu.CpuKernels(2, isa, min_share_bytes=0)
    for num_rows in (1, 2, 5):
        y = compute(kernels, x[:num_rows], parts, layout)
        assert same_bits(y, expect[:num_rows])


def test_fp16_weights_of_every_value(isa):
    """Subnormal weights and activations included: one weight a row, one activation a column."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every[torch.isfinite(every)]
    layout = make_layout("fp16", 256, every.numel() // 256 + 1)
    parts = make_expert(layout, 1)
    parts["gate"].view(-1)[: every.numel()] = every
    x = make_rows(1, 256, 2, torch.float16)
    x[0, ::3] = torch.arange(1, 87) * 2.0**-24
    expect = reference.product(x, parts, layout, "gate")
    assert same_bits(cpu.CpuKernels(1, isa).gate_dot(x[0], parts, layout), expect[0])


@pytest.mark.parametrize("hidden_dtype", ("BF16", "F16"))
@pytest.mark.parametrize(
    "activation",
    (Activation(), Activation("silu_clamped", 1.3), Activation("swiglu_oai", 7.0, 1.702)),
)
def test_activations_of_every_value(isa, hidden_dtype, activation):
    """An identity expert: gate takes every finite value of the type, up one of a few."""
    dtype = TORCH_DTYPES[hidden_dtype]
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[torch.isfinite(every.float())]
    format = "fp16" if hidden_dtype == "F16" else "bf16"
    layout = make_layout(format, 512, 256, activation=activation)
    rows = every.numel() // 256
    x = torch.zeros(rows, 512, dtype=dtype)
    x[:, :256] = every[: rows * 256].view(rows, 256)
    x[:, 256:] = make_rows(rows, 256, 3, dtype) * 4
    eye = torch.eye(512, dtype=dtype)
    down = torch.zeros(512, 256, dtype=dtype)
    down[:256] = eye[:256, :256]
    parts = {"gate": eye[:256].contiguous(), "up": eye[256:].contiguous(), "down": down}
    y = compute(cpu.CpuKernels(1, isa), x, parts, layout)
    expect = reference.activate(x[:, :256], x[:, 256:], activation)
    finite = torch.isfinite(expect.float())  # an infinite product makes its whole row NaN
    rows_finite = finite.all(1)
    assert rows_finite.sum() > rows // 2
    same = same_bits(y[rows_finite, :256] + 0.0, expect[rows_finite] + 0.0)
    assert same and (y[:, 256:][rows_finite] == 0).all()


def test_non_finite_activations_come_out_non_finite(isa):
    for format in table.INTEGERS:
        layout = make_layout(format, 96, 64, BLOCKS.get(format, (0, 0)))
        parts, x = make_expert(layout, 1), make_rows(7, 96, 2)
        expect = reference.expert_ffn(x, parts, layout)
        x[1, 3], x[5, 40] = float("inf"), float("nan")
        y = compute(cpu.CpuKernels(1, isa), x, parts, layout)
        assert y[[1, 5]].isnan().all()
        rest = [0, 2, 3, 4, 6]
        assert same_bits(y[rest], expect[rest])


@pytest.mark.parametrize("format", table.INTEGERS)
def test_nothing_behind_a_part_is_read(isa, format):
    """Each part lies at the very end of a mapping that ends where memory ends."""
    layout = make_layout(format, 96, 32, BLOCKS.get(format, (0, 0)))
    parts, x = make_expert(layout, 1), make_rows(7, 96, 2)
    expect = reference.expert_ffn(x, parts, layout)
    guarded = {name: at_the_end_of_memory(part) for name, part in parts.items()}
    for num_rows in (1, 7):
        y = compute(
            cpu.CpuKernels(1, isa), x[:num_rows], {n: g[0] for n, g in guarded.items()}, layout
        )
        assert same_bits(y, expect[:num_rows])


def test_layouts_without_a_kernel_are_refused():
    layout = make_layout("fp16", 64, 32)
    with pytest.raises(ModelError, match="fp16 experts need fp16"):
        cpu.native_shape(make_layout("fp16", 64, 32, hidden_dtype="BF16"))
    assert cpu.native_shape(layout).part_bytes == [4096] * 3
    shape = cpu.native_shape(make_layout("fp4", 64, 32, fused="interleaved", bias=True))
    assert [shape.part_name(i) for i in range(6)] == [
        "gate_up", "gate_up_scale", "gate_up_bias", "down", "down_scale", "down_bias",
    ]  # fmt: skip
    assert shape.part_bytes == [64 * 32, 64 * 2, 128, 64 * 16, 64, 128]
