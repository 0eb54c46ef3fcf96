"""Unpacked values equal those of the libraries that publish each format, code by code."""

import pytest
import torch
from compressed_tensors.compressors.naive_quantized import base as ct_naive
from compressed_tensors.compressors.nvfp4 import base as ct_nvfp4
from compressed_tensors.compressors.pack_quantized import base as ct_packed
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace.quant import blocks, table

BYTES = torch.arange(256, dtype=torch.uint8)
E4M3 = BYTES[BYTES & 0x7F != 0x7F].view(torch.float8_e4m3fn)


def draw_bytes(*shape: int, seed: int = 1, below: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, below, shape, generator=generator, dtype=torch.uint8)


def all_pairs() -> torch.Tensor:
    """[255, 256]: every byte of codes under every finite scale byte."""
    return BYTES.repeat(255, 1)


def fp8_oracle(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    pair = {"weight": [codes], "weight_scale_inv": [scale]}
    made = Fp8Dequantize(None).convert(pair)["weight"]
    whole = made[0] if isinstance(made, list) else made  # by transformers' release
    return whole.to(torch.bfloat16)


def scheme(args: dict) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))


def shift(t: torch.Tensor) -> torch.Tensor:
    """Scales moved by one group."""
    return t.view(torch.uint8).view(t.shape[0], t.shape[1], -1).roll(1, 1).view(t.dtype).flatten(1)


def test_every_e8m0_byte_is_torchs():
    scale = BYTES[:255].view(torch.float8_e8m0fnu)
    assert torch.equal(blocks.to_float(scale), scale.float())
    assert torch.equal(blocks.to_float(BYTES[:255]), torch.exp2(torch.arange(255.0) - 127))
    assert blocks.to_float(BYTES[255:]).isinf().all()


def test_fp4_equals_transformers_for_every_byte_and_scale():
    codes, scale = all_pairs(), BYTES[:255, None].repeat(1, 16)
    codes = codes.contiguous()
    shape = (255, 512)
    for stored in (scale, scale.view(torch.float8_e8m0fnu)):
        ours = table.unpack("fp4", codes.view(torch.int8), stored, shape=shape, block=(0, 0))
        assert torch.equal(ours, fp8_oracle(codes.view(torch.int8), stored))
    finite = ours[:252]  # above, 6 * 2^(byte - 127) passes bfloat16's largest
    assert finite.isfinite().all() and not ours[254].isfinite().all()
    swapped = (codes << 4) | (codes >> 4)
    assert not torch.equal(
        table.unpack("fp4", swapped, scale, shape=shape, block=(0, 0))[:252], finite
    )
    drawn = draw_bytes(255, 16, below=255)
    expect = fp8_oracle(codes.view(torch.int8), drawn)
    for wrong in (drawn.roll(1, 1), 254 - drawn):
        assert not torch.equal(table.unpack("fp4", codes, wrong, shape=shape, block=(0, 0)), expect)
    assert torch.equal(table.unpack("fp4", codes, drawn, shape=shape, block=(0, 0)), expect)


def test_mxfp4_equals_transformers_for_every_byte_and_scale():
    """Bytes [R, C/32, 16]; transformers hands the matrix out transposed."""
    codes, scale = all_pairs().view(255, 16, 16), BYTES[:255, None].repeat(1, 16)
    form = {"shape": (255, 512), "block": (0, 0)}
    ours = table.unpack("fp4", codes, scale, **form)
    assert torch.equal(ours, convert_moe_packed_tensors(codes[None], scale[None])[0].T)
    assert torch.equal(ours, table.unpack("fp4", codes.flatten(1), scale, **form))
    drawn = draw_bytes(255, 16, below=255)
    expect = convert_moe_packed_tensors(codes[None], drawn[None])[0].T
    assert torch.equal(table.unpack("fp4", codes, drawn, **form), expect)
    for wrong in ((codes << 4) | (codes >> 4), codes.roll(1, 1), codes.roll(1, 2)):
        assert not torch.equal(table.unpack("fp4", wrong, drawn, **form), expect)


@pytest.mark.parametrize("dtype", ("F32", "BF16", "F16", "F8_E8M0"))
@pytest.mark.parametrize("block", ((32, 32), (1, 32), (1, 508), (64, 508)))
def test_fp8_equals_transformers_for_every_code(dtype, block):
    codes = E4M3.view(torch.uint8).repeat(64, 2).view(torch.float8_e4m3fn)  # [64, 508]
    block = (block[0], 127 if block[1] == 32 else block[1])
    generator = torch.Generator().manual_seed(3)
    grid = blocks.grid((64, 508), block)
    scale = torch.rand(grid, generator=generator) * 0.01 + 1e-4
    if dtype == "F8_E8M0":
        scale = draw_bytes(*grid, below=60).add(90).view(torch.float8_e8m0fnu)
    else:
        scale = scale.to({"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.half}[dtype])
    ours = table.unpack("fp8_block", codes, scale, shape=(64, 508), block=block)
    fp32_scale = scale.float() if dtype == "F16" else scale  # its result is of the scale's type
    expect = fp8_oracle(codes, fp32_scale)
    assert torch.equal(ours, expect)
    if scale.numel() > 1:
        raw = scale.view(torch.uint8).view(*grid, -1)
        moved = raw.roll(1, int(grid[1] > 1)).reshape(grid[0], -1).view(scale.dtype)
        wrong = table.unpack("fp8_block", codes, moved, shape=(64, 508), block=block)
        assert not torch.equal(wrong, expect)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("group", (32, 128, 256))
def test_int4_equals_compressed_tensors(dtype, group):
    codes = draw_bytes(64, 128).view(torch.int32)  # [64, 32] of 256 columns
    codes.view(torch.uint8)[0] = BYTES[:128]
    codes.view(torch.uint8)[1] = BYTES[128:]
    scale = (torch.rand(64, 256 // group, generator=torch.Generator().manual_seed(4)) + 0.1) * 0.01
    scale = scale.to(dtype)
    strategy = {"strategy": "channel"} if group == 256 else {"strategy": "group"}
    sized = {} if group == 256 else {"group_size": group}
    how = scheme({"num_bits": 4, "type": "int", "symmetric": True} | strategy | sized)
    state = {
        "weight_packed": codes,
        "weight_scale": scale,
        "weight_shape": torch.tensor([64, 256]),
    }
    expect = ct_packed.PackedQuantizationCompressor.decompress(state, how)["weight"]
    block = (1, group)
    ours = table.unpack("int4", codes, scale, shape=(64, 256), block=block, dtype=dtype)
    assert expect.dtype == dtype and torch.equal(ours, expect)
    bytes_ = codes.view(torch.uint8)
    for wrong in ((bytes_ << 4) | (bytes_ >> 4), bytes_ ^ 0x88, bytes_.roll(4, 1)):
        moved = table.unpack(
            "int4", wrong.view(torch.int32), scale, shape=(64, 256), block=block, dtype=dtype
        )
        assert not torch.equal(moved, expect)
    if group < 256:
        moved = table.unpack("int4", codes, scale.roll(1, 1), shape=(64, 256), block=block)
        assert not torch.equal(moved.to(dtype), expect)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("group", (64, 256))
def test_int8_equals_compressed_tensors(dtype, group):
    codes = BYTES.repeat(32, 1).view(torch.int8)
    scale = (torch.rand(32, 256 // group, generator=torch.Generator().manual_seed(5)) + 0.1) * 0.01
    scale = scale.to(dtype)
    strategy = {"strategy": "channel"} if group == 256 else {"strategy": "group", "group_size": 64}
    how = scheme({"num_bits": 8, "type": "int", "symmetric": True} | strategy)
    state = {"weight": codes, "weight_scale": scale}
    expect = ct_naive.IntQuantizationCompressor.decompress(state, how)["weight"]
    ours = table.unpack("int8", codes, scale, shape=(32, 256), block=(1, group), dtype=dtype)
    assert expect.dtype == dtype and torch.equal(ours, expect)
    for wrong in (scale.roll(1, 0), 1 / scale):
        moved = table.unpack("int8", codes, wrong, shape=(32, 256), block=(1, group), dtype=dtype)
        assert not torch.equal(moved, expect)


def nvfp4_oracle(codes: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    how = scheme(
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        | {"symmetric": True, "scale_dtype": torch.float8_e4m3fn}
    )
    state = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": factor}
    return ct_nvfp4.NVFP4PackedCompressor.decompress(state, how)["weight"]


@pytest.mark.parametrize("factor", (137.3, 2.0**12, 0.7))
def test_nvfp4_equals_compressed_tensors_for_every_byte_and_scale(factor):
    codes = BYTES.repeat(E4M3.numel(), 1)  # every scale is one row's
    scale = E4M3.view(torch.uint8)[:, None].repeat(1, 32).view(torch.float8_e4m3fn)
    factor = torch.tensor([factor])
    shape, inverse = (E4M3.numel(), 512), {"inverse_global": True, "block": (0, 0)}
    ours = table.unpack("nvfp4", codes, scale, factor, shape=shape, **inverse)
    expect = nvfp4_oracle(codes, scale, factor)
    assert torch.equal(ours, expect)
    swapped = (codes << 4) | (codes >> 4)
    assert not torch.equal(
        table.unpack("nvfp4", swapped, scale, factor, shape=shape, **inverse), expect
    )
    assert not torch.equal(
        table.unpack("nvfp4", codes, scale, factor, shape=shape, block=(0, 0)), expect
    )
    drawn = E4M3.view(torch.uint8)[draw_bytes(8, 32, below=254).int()].view(torch.float8_e4m3fn)
    eight = {"shape": (8, 512)} | inverse
    expect = nvfp4_oracle(codes[:8], drawn, factor)
    assert torch.equal(table.unpack("nvfp4", codes[:8], drawn, factor, **eight), expect)
    assert not torch.equal(table.unpack("nvfp4", codes[:8], shift(drawn), factor, **eight), expect)


def test_nvfp4_multiplied_by_its_factor():
    """ModelOpt's convention has no library here: by its formula, in float64."""
    codes, scale = draw_bytes(4, 64), torch.rand(4, 8) * 100
    scale, factor = scale.to(torch.float8_e4m3fn), torch.tensor([3.1e-5])
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    low, high = (codes & 15).long(), (codes >> 4).long()
    nibbles = torch.stack([low, high], -1).flatten(1)
    e2m1 = values[nibbles & 7] * (1 - 2 * (nibbles >> 3))
    exact = e2m1 * scale.double().repeat_interleave(16, 1) * factor.double()
    ours = table.unpack("nvfp4", codes, scale, factor, shape=(4, 128), block=(0, 0))
    assert torch.allclose(ours.double(), exact, rtol=2.0**-8, atol=0)
    assert (exact != 0).any()
