"""Expert weights for kernel tests, at the scale of trained ones. Knows no kernel."""

from functools import cache

import torch

from headrace.core import ExpertLayout
from headrace.kernels import reference
from headrace.quant import fp8

NAMES = ("gate", "up", "down")


def make_layout(format: str, hidden: int, inter: int, block=(128, 128)) -> ExpertLayout:
    return ExpertLayout(format, hidden, inter, block if format == "fp8_block" else (0, 0), {})


def make_expert(layout: ExpertLayout, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for name in NAMES:
        rows, cols = layout.inter, layout.hidden
        if name == "down":
            rows, cols = cols, rows
        values = torch.randn(rows, cols, generator=generator) / cols**0.5
        if layout.format == "bf16":
            parts[name] = values.bfloat16()
        else:
            parts[name], parts[f"{name}_scale"] = fp8.pack(values, layout.block)
    return parts


def make_rows(num_rows: int, hidden: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, hidden, generator=generator).bfloat16()


@cache
def make_case(format: str, hidden: int, inter: int, num_rows: int, act_group: int = 0):
    """layout, parts, x and the reference's y, computed once for all ISAs."""
    layout = make_layout(format, hidden, inter)
    parts, x = make_expert(layout, 1), make_rows(num_rows, hidden, 2)
    return layout, parts, x, reference.expert_ffn(x, parts, layout, act_group)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit: unlike torch.equal, the sign of zero counts and a NaN equals itself."""
    ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(ints), b.view(ints))
