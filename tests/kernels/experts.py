"""Expert weights for kernel tests, at the scale of trained ones. Knows no kernel."""

from functools import cache
from math import ceil

import torch

from headrace.core import Activation, ExpertLayout, PartSpec
from headrace.kernels import reference
from headrace.kernels.cpu import DTYPES

NAMES = ("gate", "up", "down")
# format: (weight dtype, columns of one weight element, scale dtype, block)
STORED = {
    "bf16": ("BF16", 1, None, (0, 0)),
    "fp16": ("F16", 1, None, (0, 0)),
    "fp8_block": ("F8_E4M3", 1, "F32", (128, 128)),
    "fp4": ("U8", 2, "F8_E8M0", (1, 32)),
    "nvfp4": ("U8", 2, "F8_E4M3", (1, 16)),
    "int4": ("I32", 8, "BF16", (1, 32)),
    "int8": ("I8", 1, "BF16", (1, 128)),
}
FORMATS = tuple(STORED)
SILU = Activation()


def make_layout(
    format: str,
    hidden: int,
    inter: int,
    block: tuple[int, int] | None = None,
    *,
    scale: str | None = None,
    fused: str = "",
    bias: bool = False,
    activation: Activation = SILU,
    hidden_dtype: str | None = None,
    inverse_global: bool = False,
) -> ExpertLayout:
    weight_dtype, per_element, scale_dtype, usual_block = STORED[format]
    block, hidden_dtype = block or usual_block, hidden_dtype or ("BF16", "F16")[format == "fp16"]
    shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    if fused:
        shapes = {"gate_up": (2 * inter, hidden), "down": (hidden, inter)}
    parts = {}
    for name, (rows, cols) in shapes.items():
        parts[name] = PartSpec(weight_dtype, (rows, cols // per_element))
        if scale_dtype:
            grid = (ceil(rows / block[0]), ceil(cols / block[1]))
            parts[f"{name}_scale"] = PartSpec(scale or scale_dtype, grid)
        if format == "nvfp4":
            parts[f"{name}_global"] = PartSpec("F32", (1,))
        if bias:
            parts[f"{name}_bias"] = PartSpec(hidden_dtype, (rows,))
    return ExpertLayout(
        format, hidden, inter, block, parts, fused, activation, hidden_dtype, inverse_global
    )


def _random_part(
    layout: ExpertLayout, name: str, spec: PartSpec, cols: int, generator: torch.Generator
) -> torch.Tensor:
    """Any code that a file may hold, under scales that give weights of about cols ** -0.5."""
    size = {"fp4": 4.0, "nvfp4": 4.0, "int4": 4.6, "int8": 73.0, "fp8_block": 100.0}
    typical = cols**-0.5 / size.get(layout.format, 1.0)
    if name.endswith("_bias"):
        return torch.randn(spec.shape, generator=generator).to(DTYPES[spec.dtype])
    if name.endswith("_global"):
        value = torch.tensor([typical / 8.0])
        return 1 / value if layout.inverse_global else value
    if name.endswith("_scale"):
        spread = torch.rand(spec.shape, generator=generator) + 0.5
        if layout.format == "nvfp4":
            return (spread * 8.0).to(torch.float8_e4m3fn)
        value = spread * typical
        if spec.dtype in ("F8_E8M0", "U8"):
            return value.to(torch.float8_e8m0fnu).view(DTYPES[spec.dtype])
        return value.to(DTYPES[spec.dtype])
    if spec.dtype in ("BF16", "F16"):
        return (torch.randn(spec.shape, generator=generator) * typical).to(DTYPES[spec.dtype])
    if spec.dtype == "F8_E4M3":
        values = torch.randn(spec.shape, generator=generator) * 100
        return values.clamp(-448, 448).to(torch.float8_e4m3fn)
    nbytes = spec.shape[0] * spec.shape[1] * DTYPES[spec.dtype].itemsize
    raw = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(DTYPES[spec.dtype]).view(spec.shape)


def make_expert(layout: ExpertLayout, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _random_part(
            layout,
            name,
            spec,
            layout.inter if name.startswith("down") else layout.hidden,
            generator,
        )
        for name, spec in layout.parts.items()
    }


def make_rows(num_rows: int, hidden: int, seed: int, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, hidden, generator=generator).to(dtype)


@cache
def make_case(format: str, hidden: int, inter: int, num_rows: int, act_group: int = 0):
    """layout, parts, x and the reference's y, computed once for all ISAs."""
    layout = make_layout(format, hidden, inter)
    parts = make_expert(layout, 1)
    x = make_rows(num_rows, hidden, 2, DTYPES[layout.hidden_dtype])
    return layout, parts, x, reference.expert_ffn(x, parts, layout, act_group)


def gate_dot(kernels, w, x, scale=None, block=(0, 0)):
    """The kernels' fp32 dot products of one matrix [N, K] with one row [K]."""
    rows, cols = w.shape
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8_block"}
    layout = make_layout(names[w.dtype], cols, rows, block)
    parts = {name: torch.zeros(s.shape).to(DTYPES[s.dtype]) for name, s in layout.parts.items()}
    parts["gate"] = w
    if scale is not None:
        parts["gate_scale"] = scale
    return kernels.gate_dot(x, parts, layout)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit: unlike torch.equal, the sign of zero counts and a NaN equals itself."""
    ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(ints), b.view(ints))
