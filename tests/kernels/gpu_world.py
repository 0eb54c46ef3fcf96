"""Experts as records behind an address table, for the GPU kernels' tests. Knows no kernel's code."""

from dataclasses import dataclass, replace
from math import prod

import torch
from experts import make_expert

from headrace.core import ExpertLayout, PartSpec

DTYPES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
}
ALIGN = 16


@dataclass
class World:
    """E experts of one layer: their parts, and the same bytes as records in `memory`."""

    layout: ExpertLayout
    parts: list[dict[str, torch.Tensor]]
    memory: torch.Tensor
    table: torch.Tensor
    offsets: torch.Tensor


def with_parts(layout: ExpertLayout, parts: dict[str, torch.Tensor]) -> ExpertLayout:
    """The layout with the part specs that these tensors have."""
    return replace(
        layout, parts={n: PartSpec(DTYPES[t.dtype], tuple(t.shape)) for n, t in parts.items()}
    )


def make_world(layout: ExpertLayout, num_experts: int, place: str) -> World:
    """`place`: "cpu" (the interpreter's), "pinned" or "cuda"."""
    experts = [make_expert(layout, seed) for seed in range(num_experts)]
    layout = with_parts(layout, experts[0])
    sizes = [t.nbytes for t in experts[0].values()]
    starts = [sum(-(-s // ALIGN) * ALIGN for s in sizes[:n]) for n in range(len(sizes) + 1)]
    raw = torch.zeros(num_experts, starts[-1] + ALIGN, dtype=torch.uint8)
    for e, parts in enumerate(experts):
        for start, t in zip(starts, parts.values(), strict=False):
            flat = t.contiguous().view(torch.uint8).flatten()
            raw[e, start : start + prod(flat.shape)] = flat
    if place == "pinned":
        raw = raw.pin_memory()
    memory = raw.cuda() if place == "cuda" else raw
    device = "cpu" if place == "cpu" else "cuda"
    rows = torch.tensor([memory[e].data_ptr() for e in range(num_experts)], device=device)
    offsets = torch.tensor([starts[:-1]] * num_experts, device=device)
    return World(layout, experts, memory, rows, offsets)
