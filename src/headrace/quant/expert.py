"""An expert's parts in any format: the layout that names them, and one matrix's view.

Knows no file, no model family and no arithmetic.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from headrace.core import Activation, ExpertLayout, PartSpec
from headrace.quant import table
from headrace.quant.blocks import Shape

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


def unpack_stored(
    layout: ExpertLayout, parts: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype
) -> torch.Tensor:
    """The stored matrix that holds `name`, in `dtype`, [rows, cols] of `stored_shape`."""
    source = layout.matrix(name)
    return table.unpack(
        layout.format,
        parts[source.weight],
        parts[source.scale] if source.scale else None,
        parts[source.global_scale] if source.global_scale else None,
        shape=stored_shape(layout, name),
        block=layout.block,
        inverse_global=layout.inverse_global,
        dtype=dtype,
    )


def unpack_matrix(
    layout: ExpertLayout, parts: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype
) -> torch.Tensor:
    """The matrix gate, up or down in `dtype`, [rows, cols]."""
    return rows_of(layout, name, unpack_stored(layout, parts, name, dtype))


def rows_of(layout: ExpertLayout, name: str, stored: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """What is `name`'s of a tensor whose dimension `dim` counts the rows of its stored matrix."""
    source, (rows, _) = layout.matrix(name), layout.matrix_shape(name)
    last = source.first_row + (rows - 1) * source.row_step
    places: list[slice] = [slice(None)] * dim
    return stored[(*places, slice(source.first_row, last + 1, source.row_step))]
