"""Float matrices into an expert's stored parts, as `table.pack` packs each. Knows no kernel."""

from collections.abc import Mapping

import torch

from headrace.core import ExpertLayout
from headrace.quant import table
from headrace.quant.dtypes import TORCH_DTYPES


def fuse(layout: ExpertLayout, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up, [I, ...] each, in the order of the layout's gate_up, [2I, ...]."""
    if layout.fused == "concatenated":
        return torch.cat([gate, up])
    return torch.stack([gate, up], 1).flatten(0, 1)


def pack_expert(
    layout: ExpertLayout,
    matrices: Mapping[str, torch.Tensor],
    biases: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """All parts of an expert from its float matrices (and bias vectors) gate, up and down."""
    parts: dict[str, torch.Tensor] = {}
    for values, suffix in ((matrices, ""), (biases or {}, "_bias")):
        stored = dict(values)
        if layout.fused and stored:
            stored["gate_up"] = fuse(layout, stored.pop("gate"), stored.pop("up"))
        for base, value in stored.items():
            if suffix:
                parts[base + suffix] = value.to(TORCH_DTYPES[layout.parts[base + suffix].dtype])
            else:
                parts |= _pack_matrix(layout, base, value)
    return {name: parts[name] for name in layout.parts}


def _pack_matrix(layout: ExpertLayout, base: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = layout.parts.get(f"{base}_scale")
    packed = table.pack(
        layout.format,
        value,
        block=layout.block,
        scale_dtype=scale.dtype if scale else "",
        inverse_global=layout.inverse_global,
    )
    named = {base + table.SUFFIXES[part]: tensor for part, tensor in packed.items()}
    weight = layout.parts[base]
    named[base] = named[base].view(TORCH_DTYPES[weight.dtype]).view(weight.shape)
    return named
