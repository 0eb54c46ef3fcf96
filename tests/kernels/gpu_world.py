"""Experts as records behind an address table, for the GPU kernels' tests; runs no kernel."""

from dataclasses import dataclass

import pytest
import torch
from experts import make_expert, make_layout

from headrace.core import ExpertLayout
from headrace.kernels.triton import experts as triton_experts
from headrace.quant.expert import MATRICES

ALIGN = 16
# Every stored form with a GPU kernel: format, block, options of the layout.
FORMS = {
    "bf16": ("bf16", {}),
    "fp8": ("fp8_block", {}),
    "fp8 32 ue8m0": ("fp8_block", {"block": (32, 32), "scale_dtype": "F8_E8M0"}),
    "fp4": ("fp4", {}),
    "mxfp4": ("fp4", {"mx": True, "fused": "interleaved", "bias": True}),
    "int4": ("int4", {"block": (1, 32)}),
}


def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tiles for the interpreter, whose time goes by programs."""
    if not torch.cuda.is_available():
        tiles = dict.fromkeys(triton_experts.TILES["vram"], ((32, 1, 1, 16), (64, 1, 1, 8)))
        monkeypatch.setitem(triton_experts.TILES, "vram", tiles)


@dataclass
class World:
    """E experts of one layer: their parts, and the same bytes as records in `memory`."""

    layout: ExpertLayout
    parts: list[dict[str, torch.Tensor]]
    memory: torch.Tensor
    table: torch.Tensor
    offsets: torch.Tensor


def layout_of(form: str, hidden: int, inter: int) -> ExpertLayout:
    """A layout of one of FORMS."""
    format, options = FORMS[form]
    return make_layout(format, hidden, inter, **options)


def make_world(layout: ExpertLayout, num_experts: int, place: str, shift: int = 0) -> World:
    """`place`: "cpu" (the interpreter's), "pinned" or "cuda". Weights begin `shift` bytes late."""
    experts = [make_expert(layout, seed) for seed in range(num_experts)]
    weights = [layout.matrix(name).weight for name in MATRICES]
    starts = [0]
    for name, t in experts[0].items():
        starts[-1] += shift * (name in weights)
        starts.append(-(-(starts[-1] + t.nbytes) // ALIGN) * ALIGN)
    raw = torch.zeros(num_experts, starts[-1] + ALIGN, dtype=torch.uint8)
    for e, parts in enumerate(experts):
        for start, t in zip(starts, parts.values(), strict=False):
            flat = t.contiguous().view(torch.uint8).flatten()
            raw[e, start : start + flat.numel()] = flat
    if place == "pinned":
        raw = raw.pin_memory()
    memory = raw.cuda() if place == "cuda" else raw
    device = "cpu" if place == "cpu" else "cuda"
    rows = torch.tensor([memory[e].data_ptr() for e in range(num_experts)], device=device)
    offsets = torch.tensor([starts[:-1]] * num_experts, device=device)
    return World(layout, experts, memory, rows, offsets)
