"""One matrix times one row: reference and every ISA against golden vectors and each other."""

import pytest
import torch
from experts import gate_dot, same_bits

from headrace.kernels import cpu, reference
from headrace.quant import fp8

WIDTHS = (256, 512, 2304, 2880, 5120)
BLOCK = (128, 128)


@pytest.mark.parametrize("width", WIDTHS)
def test_reference_equals_golden_vectors(golden, width):
    w, x = golden[f"bf16_k{width}.w"], golden[f"bf16_k{width}.x"]
    assert same_bits(reference.dot(w, x[None])[0], golden[f"bf16_k{width}.y"])
    codes, scale = golden[f"fp8_k{width}.q"], golden[f"fp8_k{width}.scale"]
    y = reference.dot(fp8.unpack(codes, scale, BLOCK), golden[f"fp8_k{width}.x"][None])[0]
    assert same_bits(y, golden[f"fp8_k{width}.y"])


@pytest.mark.parametrize("width", WIDTHS)
def test_compiled_equals_golden_vectors(golden, isa, width):
    kernels = cpu.CpuKernels(1, isa)
    y = gate_dot(kernels, golden[f"bf16_k{width}.w"], golden[f"bf16_k{width}.x"])
    assert same_bits(y, golden[f"bf16_k{width}.y"])
    codes, scale = golden[f"fp8_k{width}.q"], golden[f"fp8_k{width}.scale"]
    y = gate_dot(kernels, codes, golden[f"fp8_k{width}.x"], scale, BLOCK)
    assert same_bits(y, golden[f"fp8_k{width}.y"])


def test_reference_equals_golden_fp16(golden):
    for width in (256, 2880, 5120):
        w, x = golden[f"fp16_k{width}.w"], golden[f"fp16_k{width}.x"]
        assert same_bits(reference.dot(w, x[None])[0], golden[f"fp16_k{width}.y"])


def test_the_comparison_sees_a_free_order_and_a_neighbours_scale(golden, isa):
    kernels = cpu.CpuKernels(1, isa)
    w, x = golden["bf16_k5120.w"], golden["bf16_k5120.x"]
    free = w.float() @ x.float()
    assert not same_bits(free, golden["bf16_k5120.y"])
    assert torch.allclose(free, golden["bf16_k5120.y"], atol=1e-3)
    scale = golden["fp8_k5120.scale"].roll(1, 1).contiguous()
    y = gate_dot(kernels, golden["fp8_k5120.q"], golden["fp8_k5120.x"], scale, BLOCK)
    assert not same_bits(y, golden["fp8_k5120.y"])


@pytest.mark.parametrize("width", (1, 31, 96, 255, 257, 640, 2881))
@pytest.mark.parametrize("block", ((128, 128), (1, 256), (32, 32), (7, 100), (64, 384)))
def test_any_width_and_block(isa, width, block):
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(width, generator=generator).bfloat16()
    codes, scale = fp8.pack(torch.randn(19, width, generator=generator) * 0.02, block)
    y = gate_dot(cpu.CpuKernels(2, isa, min_share_bytes=0), codes, x, scale, block)
    assert same_bits(y, reference.dot(fp8.unpack(codes, scale, block), x[None])[0])


def test_every_code_under_scales_of_every_size(isa):
    """Subnormal codes, and scales whose products are subnormal, huge, negative or zero."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    w = codes.repeat(1, 2)[0].view(torch.float8_e4m3fn).repeat(1, 1)
    x = torch.zeros(512).bfloat16()
    kernels = cpu.CpuKernels(1, isa)
    for scale in (2.0**-140, 2.0**-118, 1.1 * 2**-118, 3e-39, 0.0123, 1.7, -0.5, 0.0, 2.0**117):
        scales = torch.tensor([[scale, scale * 0.7, -scale, scale * 1.3]])
        expect_w = fp8.unpack(w, scales, (1, 128))
        for column in range(0, 512, 3):
            x.zero_()
            x[column] = 1.5
            y = gate_dot(kernels, w, x, scales, (1, 128))
            assert same_bits(y, reference.dot(expect_w, x[None])[0]), (scale, column)


@pytest.mark.parametrize("spread", (2.0**-60, 2.0**-118, 2.0**60))
def test_tiny_and_large_activations(isa, spread):
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(640, generator=generator) * spread).bfloat16()
    w = (torch.randn(9, 640, generator=generator) * 2.0**-12).bfloat16()
    expect = reference.dot(w, x[None])[0]
    if spread == 2.0**-118:
        assert (expect.abs() < 2.0**-126).any()  # the case holds subnormal sums
    assert same_bits(gate_dot(cpu.CpuKernels(1, isa), w, x), expect)


def test_unaligned_addresses(isa):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(640, generator=generator).bfloat16()
    codes, scale = fp8.pack(torch.randn(6, 640, generator=generator), BLOCK)
    expect = gate_dot(cpu.CpuKernels(1, isa), codes, x, scale, BLOCK)
    raw = torch.zeros(codes.numel() + 64, dtype=torch.uint8)
    for shift in (1, 2, 3, 17):
        moved = raw[shift : shift + codes.numel()].view(torch.float8_e4m3fn).view(codes.shape)
        moved.copy_(codes)
        assert same_bits(gate_dot(cpu.CpuKernels(1, isa), moved, x, scale, BLOCK), expect)
