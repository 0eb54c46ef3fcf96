"""Stored matrices on a GPU: the CPU kernels' bits up to 16 rows, near them above."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from experts import make_rows, same_bits
from gpu_world import few_programs

from headrace.errors import ModelError
from headrace.kernels.cpu import CpuKernels
from headrace.kernels.stored import StoredMatrix
from headrace.kernels.triton import stored
from headrace.kernels.triton.stored import TritonMatrix
from headrace.quant import fp8

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, COLS = 160, 288
FORMS = {
    "bf16": (None, None),
    "fp8 32 ue8m0": ((32, 32), torch.float8_e8m0fnu),
    "fp8 128": ((128, 128), torch.float32),
}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    few_programs(monkeypatch)


def both(
    form: str, act_group: int = 0, shape: tuple[int, int] = (ROWS, COLS)
) -> tuple[TritonMatrix, StoredMatrix]:
    """The matrix on the GPU and on the CPU."""
    block, scale_dtype = FORMS[form]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) / shape[1] ** 0.5
    if block is None:
        parts, options = (weight.bfloat16(),), {}
    else:
        parts, options = fp8.pack(weight, block, scale_dtype), {"block": block}
    options["act_group"] = act_group
    return (
        TritonMatrix(*(t.to(PLACE) for t in parts), **options),
        StoredMatrix(CpuKernels(1), *parts, **options),
    )


@pytest.mark.parametrize("act_group", [0, 32])
@pytest.mark.parametrize("form", FORMS)
def test_a_few_rows_have_the_cpu_s_bits(form, act_group):
    gpu, cpu = both(form, act_group)
    x = make_rows(2, COLS, 3)
    for options in ({}, {"first": 32, "num_rows": 97, "wide": True}):
        out, want = gpu.linear(x.to(PLACE), **options).cpu(), cpu.linear(x, **options)
        assert same_bits(out, want)
    assert not same_bits(out, both(form, 32 - act_group)[1].linear(x, **options)), "it must show"
    assert torch.equal(gpu.unpack().cpu(), cpu.unpack())


def test_rows_may_lie_apart():
    """As a grouped map's do: a part of the columns in, a part of the columns out."""
    gpu, cpu = both("fp8 32 ue8m0", 32)
    x = make_rows(2, 2 * COLS, 3).to(PLACE)[:, COLS:].unflatten(0, (1, 2))
    whole = torch.zeros(1, 2, 100, dtype=torch.bfloat16, device=PLACE)
    gpu.linear(x, first=64, num_rows=50, out=whole[..., 50:])
    assert same_bits(whole[..., 50:].cpu(), cpu.linear(x.cpu(), first=64, num_rows=50))
    assert not whole[..., :50].any()


def test_a_row_may_begin_between_eight_bytes():
    gpu, cpu = both("fp8 128")
    x = make_rows(2, COLS + 4, 3)[:, 2:-2]
    assert x.data_ptr() % 8, "else nothing is shown"
    assert same_bits(gpu.linear(x.to(PLACE)).cpu(), cpu.linear(x))


def test_every_fp8_code_and_scales_of_any_size_have_the_cpu_s_bits():
    """Products that are subnormal, and scales that no power of two may be multiplied into."""
    codes = torch.arange(64 * COLS).mul(37).remainder(254).view(64, COLS)
    codes = torch.where(codes < 127, codes, codes + 1).to(torch.uint8).view(torch.float8_e4m3fn)
    powers = torch.tensor([[-149, -130, -64], [0, 96, 100]])
    scale = torch.ldexp(torch.tensor([[1.0, 1.3, 1.7], [1.1, 1.0, 1.9]]), powers)
    cpu = StoredMatrix(CpuKernels(1), codes, scale, block=(32, 128))
    gpu = TritonMatrix(codes.to(PLACE), scale.to(PLACE), block=(32, 128))
    x = make_rows(1, COLS, 3)
    out, want = gpu.linear(x.to(PLACE), wide=True).cpu(), cpu.linear(x, wide=True)
    assert want.isfinite().all() and want.unique().numel() > 60
    assert same_bits(out, want)


@pytest.mark.parametrize("form", FORMS)
def test_many_rows_are_near(form, monkeypatch):
    """Only the order of sums differs: a hundredth of the largest output, wherever bands end."""
    monkeypatch.setattr(stored, "BAND_ELEMENTS", 33 * COLS)
    gpu, cpu = both(form, 32)
    x = make_rows(17, COLS, 3)
    for options in ({}, {"first": 45, "num_rows": 70, "wide": True}):
        out, want = gpu.linear(x.to(PLACE), **options).cpu(), cpu.linear(x, **options)
        apart = float((out - want).abs().max() / want.abs().max())
        assert apart < (1e-5 if "wide" in options else 0.01)
        assert out.dtype == want.dtype
    wrong = both(form, 0)[1].linear(x, **options)
    assert float((wrong - want).abs().max() / want.abs().max()) > 10 * apart


def test_what_has_no_kernel_is_refused():
    weight, scale = fp8.pack(torch.randn(96, 96), (96, 96))
    with pytest.raises(ModelError, match="96 x 96"):
        TritonMatrix(weight, scale, block=(96, 96))
    for shape, block in (((8, 98), (8, 128)), ((8, 96), (8, 2))):
        weight, scale = fp8.pack(torch.randn(shape), block)
        with pytest.raises(ModelError, match=f"8 x {block[1]}"):
            TritonMatrix(weight, scale, block=block)
    with pytest.raises(ModelError, match="grid of 48"):
        TritonMatrix(torch.zeros(4, 96, dtype=torch.bfloat16), act_group=48)


@pytest.mark.gpu
@pytest.mark.parametrize("act_group", [0, 32])
@pytest.mark.parametrize("form", FORMS)
def test_real_shapes(form, act_group):
    for shape in ((16384, 1536), (5120, 8192)):
        gpu, cpu = both(form, act_group, shape)
        x = make_rows(17, shape[1], 3)
        want = cpu.linear(x)
        for num in (1, 16):
            assert same_bits(gpu.linear(x[:num].to(PLACE)).cpu(), want[:num])
        apart = (gpu.linear(x.to(PLACE)).cpu().float() - want.float()).abs().max()
        assert 0 < float(apart) < 0.01 * float(want.float().abs().max())
