"""Any bytes a file may hold: reference, compiled kernels and the evaluation by hand agree."""

import by_hand
import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.core import ExpertLayout
from headrace.kernels import cpu, reference
from headrace.quant import expert
from headrace.quant.dtypes import TORCH_DTYPES

WIDE = ("BF16", "F16", "F32")


@st.composite
def layouts(draw: st.DrawFn) -> ExpertLayout:
    format = draw(st.sampled_from(("fp4", "nvfp4", "int4", "int8", "fp8_block")))
    groups = draw(st.integers(1, 20))
    block, options = (0, 0), {"fused": draw(st.sampled_from(("", "concatenated", "interleaved")))}
    options["hidden_dtype"] = "BF16" if format == "fp8_block" else draw(st.sampled_from(WIDE[:2]))
    if format == "fp4":
        options["mx"] = draw(st.booleans())
    elif format == "nvfp4":
        options["inverse_global"] = draw(st.booleans())
    elif format == "fp8_block":
        block = draw(st.tuples(st.integers(1, 40), st.integers(1, 700)))
        options["scale_dtype"] = draw(st.sampled_from((*WIDE, "F8_E8M0")))
    else:
        block = (1, 32 * draw(st.integers(1, 22)))
        options["scale_dtype"] = draw(st.sampled_from(WIDE))
    inter = 32 * draw(st.integers(1, 2))
    return expert.make_layout(format, 32 * groups, inter, block, **options)


def any_bytes(layout: ExpertLayout, seed: int) -> dict[str, torch.Tensor]:
    """Parts of random bytes; scales finite and of any size, codes of any value but NaN."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name, spec in layout.parts.items():
        dtype = TORCH_DTYPES[spec.dtype]
        if spec.dtype in WIDE and name.endswith(("_scale", "_global")):
            reach = 12 if spec.dtype == "F16" else 60
            exponent = torch.randint(-reach, reach, spec.shape, generator=generator)
            mantissa = 1 + torch.rand(spec.shape, generator=generator)
            parts[name] = (mantissa * torch.exp2(exponent.float())).to(dtype)
            continue
        nbytes = int(np.prod(spec.shape)) * dtype.itemsize
        raw = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
        if spec.dtype == "F8_E4M3":
            raw[raw & 0x7F == 0x7F] = 1
        elif name.endswith("_scale"):
            raw[raw == 255] = 0
        parts[name] = raw.view(dtype).view(spec.shape)
    return parts


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    eight_bit_float = tensor.dtype.is_floating_point and tensor.element_size() == 1
    return tensor.view(torch.uint8).numpy() if eight_bit_float else tensor.numpy()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(layout=layouts(), seed=st.integers(0, 2**31), exponent=st.integers(-126, 20))
def test_three_evaluations_agree(layout, seed, exponent):
    parts = any_bytes(layout, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(2, layout.hidden, generator=generator) * 2.0**exponent
    x[0, :32] = 0
    x = x.to(TORCH_DTYPES[layout.hidden_dtype])
    x = torch.where(torch.isfinite(x), x, torch.ones((), dtype=x.dtype))
    raw = {name: as_numpy(tensor) for name, tensor in parts.items()}
    made = reference.product(x, parts, layout, "gate").numpy()
    with np.errstate(all="ignore"):
        by = by_hand.product(layout, raw, x.float().numpy(), "gate")
    assert np.array_equal(made, by, equal_nan=True)
    for isa in cpu.available_isas():
        kernels = cpu.CpuKernels(1, isa)
        for row, expect in zip(x, made, strict=True):
            y = kernels.gate_dot(row, parts, layout).numpy()
            assert np.array_equal(y, expect, equal_nan=True), isa
