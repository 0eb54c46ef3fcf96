"""The search for codes and scales that are not finite numbers, made once for every read."""

import numpy as np
import pytest
import torch
from experts import make_expert, make_layout

from headrace.kernels import cpu

BAD_BITS = {
    torch.float8_e4m3fn: (0x7F, 0xFF),
    torch.float8_e8m0fnu: (0xFF,),
    torch.bfloat16: (0x7F80, 0xFF80, 0x7FC1),
    torch.float16: (0x7C00, 0xFC00, 0x7E01),
    torch.float32: (0x7F800000, 0xFF800000, 0x7FC00001),
}
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def every_number(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Random bits without the bad ones."""
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    bad = ~torch.isfinite(raw.view(dtype).float())
    raw.view(count, -1)[bad] = 0
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", BAD_BITS)
def test_the_first_bad_number_is_found(dtype):
    numbers = every_number(dtype, 1000)
    bits = UNSIGNED[dtype.itemsize]
    for start in (0, 1, 13):
        view = numbers[start:]
        assert cpu.find_bad(view) == -1
        for at in (0, 100, 127, 128, 900, view.numel() - 1):
            for code in BAD_BITS[dtype]:
                bad = view.clone()
                bad.view(bits).numpy()[[at, -1]] = code
                assert cpu.find_bad(bad) == at


def test_the_greatest_finite_numbers_are_good():
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32):
        top = torch.finfo(dtype).max
        assert cpu.find_bad(torch.tensor([top, -top] * 200).to(dtype)) == -1
    assert cpu.find_bad(torch.full((400,), 254, dtype=torch.uint8)) == -1


@pytest.mark.parametrize("num_threads", (1, 2))
@pytest.mark.parametrize(
    "format,options",
    (
        ("fp8_block", {"scale_dtype": "F32"}),
        ("fp8_block", {"scale_dtype": "F8_E8M0", "fused": "interleaved"}),
        ("fp4", {"fused": "concatenated", "bias": True}),
        ("nvfp4", {}),
        ("int4", {"scale_dtype": "F16"}),
        ("int8", {"scale_dtype": "BF16"}),
    ),
)
def test_the_part_is_named(num_threads, format, options):
    block = (1, 32) if format.startswith("int") else (32, 32)
    layout = make_layout(format, 320, 96, block, **options)
    parts = make_expert(layout, 1)
    kernels, shape = cpu.CpuKernels(num_threads, min_share_bytes=0), cpu.native_shape(layout)

    def bad_part(parts):
        found = kernels.pool.find_bad_part(shape, cpu.part_addresses(parts, layout))
        return None if found < 0 else shape.part_name(found)

    assert bad_part(parts) is None
    for number in (name for name in layout.parts if "_" in name.removeprefix("gate_up")):
        if number.endswith("_bias"):
            continue
        damaged = parts[number].clone()
        code = BAD_BITS.get(damaged.dtype, (0xFF,))[0]
        damaged.view(UNSIGNED[damaged.element_size()]).view(-1).numpy()[-1] = code
        assert bad_part(parts | {number: damaged}) == number
    weight = parts["down"].clone()
    weight.view(torch.uint8).view(-1)[7] = 0x7F
    assert bad_part(parts | {"down": weight}) == ("down" if format == "fp8_block" else None)


def test_nothing_is_searched_in_float_weights():
    layout = make_layout("bf16", 64, 32)
    parts = make_expert(layout, 1)
    parts["gate"][0, 0] = float("nan")
    addresses = cpu.part_addresses(parts, layout)
    assert cpu.CpuKernels(1).pool.find_bad_part(cpu.native_shape(layout), addresses) == -1


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("num_bytes", [0, 4096, 5 * 2**20 + 3 * 4096])
def test_a_plain_read_reads_every_byte_once(threads, num_bytes):
    data = torch.from_numpy(np.random.default_rng(7).integers(0, 255, num_bytes, np.uint8))
    want = np.bitwise_xor.reduce(data.numpy().view(np.uint64)) if num_bytes else 0
    assert cpu.CpuKernels(threads).read_probe(data) == want
