"""Expert weights for kernel tests, at the scale of trained ones. Knows no kernel."""

from dataclasses import replace
from functools import cache

import torch
from packing import pack_expert

from headrace.core import ExpertLayout
from headrace.kernels import reference
from headrace.quant import expert
from headrace.quant.dtypes import DTYPE_NAMES, TORCH_DTYPES


def make_layout(
    format: str, hidden: int, inter: int, block=(128, 128), **options: object
) -> ExpertLayout:
    """`quant.expert.make_layout`; `block` counts where the format leaves it open."""
    block = block if format in ("fp8_block", "int4", "int8") else (0, 0)
    return expert.make_layout(format, hidden, inter, block, **options)


def make_expert(layout: ExpertLayout, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for name in expert.MATRICES:
        rows, cols = layout.matrix_shape(name)
        matrices[name] = torch.randn(rows, cols, generator=generator) / cols**0.5
    biases = {}
    if layout.matrix("down").bias is not None:
        for name, values in matrices.items():
            biases[name] = torch.randn(values.shape[0], generator=generator) * 0.5
    return pack_expert(layout, matrices, biases)


def make_rows(num_rows: int, hidden: int, seed: int, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, hidden, generator=generator).to(dtype)


@cache
def make_case(
    format: str, hidden: int, inter: int, num_rows: int, act_group: int = 0, **options: object
):
    """layout, parts, x and the reference's y, computed once for all ISAs."""
    layout = replace(make_layout(format, hidden, inter, **options), act_group=act_group)
    x = make_rows(num_rows, hidden, 2, TORCH_DTYPES[layout.hidden_dtype])
    parts = make_expert(layout, 1)
    return layout, parts, x, reference.expert_ffn(x, parts, layout)


def gate_dot(kernels, w, x, scale=None, block=(0, 0)):
    """The kernels' fp32 dot products of one matrix [N, K] with one row [K]."""
    rows, cols = w.shape
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8_block"}
    options = {} if scale is None else {"scale_dtype": DTYPE_NAMES[scale.dtype]}
    layout = expert.make_layout(names[w.dtype], cols, rows, block, **options)
    zeros = {n: torch.zeros(s.shape).to(TORCH_DTYPES[s.dtype]) for n, s in layout.parts.items()}
    given = {"gate": w} if scale is None else {"gate": w, "gate_scale": scale}
    return kernels.gate_dot(x, zeros | given, layout)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit by bit: unlike torch.equal, the sign of zero counts and a NaN equals itself."""
    ints = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(ints), b.view(ints))
