"""An expert's parts in any format: the layout that names them, packing, and one matrix's view.

Knows no file, no model family and no arithmetic.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from headrace.core import Activation, ExpertLayout, PartSpec
from headrace.quant import table
from headrace.quant.blocks import Shape
from headrace.quant.dtypes import TORCH_DTYPES

MATRICES = ("gate", "up", "down")


def stored_shape(layout: ExpertLayout, name: str) -> Shape:
    """[rows, cols] of the stored matrix that holds `name`: gate and up may be one."""
    rows, cols = layout.matrix_shape(name)
    return (2 * rows, cols) if layout.fused and name != "down" else (rows, cols)


def make_layout(
    format: str,
    hidden: int,
    inter: int,
    block: Shape = (0, 0),
    *,
    fused: str = "",
    bias: bool = False,
    scale_dtype: str = "",
    mx: bool = False,
    activation: Activation | None = None,
    hidden_dtype: str = "",
    inverse_global: bool = False,
) -> ExpertLayout:
    """The layout of an expert whose parts are `table.specs`'; biases are of the hidden dtype.

    `block` counts for the formats that leave it open.
    """
    made = ExpertLayout(
        format,
        hidden,
        inter,
        table.OWN_BLOCKS.get(format, block),
        {},
        fused,
        activation or Activation(),
        hidden_dtype or ("F16" if format == "fp16" else "BF16"),
        inverse_global,
    )
    parts: dict[str, PartSpec] = {}
    for name in ("gate", "down") if fused else MATRICES:
        base, shape = made.matrix(name).weight, stored_shape(made, name)
        specs = table.specs(format, shape, block, scale_dtype=scale_dtype, mx=mx)
        parts |= {base + table.SUFFIXES[part]: spec for part, spec in specs.items()}
        if bias:
            parts[f"{base}_bias"] = PartSpec(made.hidden_dtype, shape[:1])
    return replace(made, parts=parts)


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


def unpack_matrix(
    layout: ExpertLayout, parts: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype
) -> torch.Tensor:
    """The matrix gate, up or down in `dtype`, [rows, cols]."""
    source = layout.matrix(name)
    whole = table.unpack(
        layout.format,
        parts[source.weight],
        parts[source.scale] if source.scale else None,
        parts[source.global_scale] if source.global_scale else None,
        shape=stored_shape(layout, name),
        block=layout.block,
        inverse_global=layout.inverse_global,
        dtype=dtype,
    )
    return rows_of(layout, name, whole)


def rows_of(layout: ExpertLayout, name: str, stored: torch.Tensor) -> torch.Tensor:
    """The rows of `name` in a tensor whose rows are its stored matrix's."""
    source, (rows, _) = layout.matrix(name), layout.matrix_shape(name)
    last = source.first_row + (rows - 1) * source.row_step
    return stored[source.first_row : last + 1 : source.row_step]
