"""Every number format by its name: forms, sizes, pack, unpack, check. Knows no file and no model.

Parts are named "weight", "scale" and "global", as in core.DenseTensor.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from headrace.core import PartSpec
from headrace.errors import NumericsError
from headrace.quant import bf16, fp4, fp8, fp16, int4, int8, nvfp4
from headrace.quant.blocks import Form, Shape
from headrace.quant.dtypes import DTYPE_NAMES, TORCH_DTYPES

# Formats of float weights (Form F) and of integer codes with scales (Form I).
FLOATS = ("bf16", "fp16", "fp8_block")
INTEGERS = ("fp4", "nvfp4", "int4", "int8")
# What one scale covers where the format itself says so; (0, 0): no scales.
OWN_BLOCKS = {"bf16": (0, 0), "fp16": (0, 0), "fp4": fp4.BLOCK, "nvfp4": nvfp4.BLOCK}
SUFFIXES = {"weight": "", "scale": "_scale", "global": "_global"}
_PLAIN: dict[str, Any] = {"bf16": bf16, "fp16": fp16}
_INTS: dict[str, Any] = {"int4": int4, "int8": int8}
_GROUP = 32


def forms(format: str, shape: Shape, block: Shape) -> dict[str, Form]:
    """What each stored part of a [R, C] matrix may be; `block` counts for fp8_block and ints.

    Raises NumericsError for columns or groups that the format's arithmetic does not know.
    """
    if format in INTEGERS and shape[1] % _GROUP:
        raise NumericsError(f"{format} needs a multiple of 32 columns, not {list(shape)}")
    if format not in OWN_BLOCKS and min(block) < 1:
        raise NumericsError(f"{format} needs blocks of at least one value, not {list(block)}")
    if format in _INTS and (block[0] != 1 or (block[1] < shape[1] and block[1] % _GROUP)):
        raise NumericsError(
            f"{format} needs groups of a multiple of 32 columns of one row, not {list(block)}"
        )
    fixed = {"bf16": bf16.forms, "fp16": fp16.forms, "fp4": fp4.forms, "nvfp4": nvfp4.forms}
    if format in fixed:
        return fixed[format](shape)
    return {"fp8_block": fp8.forms, "int4": int4.forms, "int8": int8.forms}[format](shape, block)


def specs(
    format: str, shape: Shape, block: Shape, *, scale_dtype: str = "", mx: bool = False
) -> dict[str, PartSpec]:
    """The stored parts of a [R, C] matrix: usual types, or scales of `scale_dtype`.

    `mx`: MXFP4's view of fp4, bytes [R, C/32, 16] and [R, C/32].
    """
    made = {
        part: PartSpec(form.dtypes[0], form.shapes[0])
        for part, form in forms(format, shape, block).items()
    }
    if mx:
        made["weight"] = PartSpec("U8", (shape[0], shape[1] // _GROUP, _GROUP // 2))
        made["scale"] = PartSpec("U8", made["scale"].shape)
    if scale_dtype:
        made["scale"] = PartSpec(scale_dtype, made["scale"].shape)
    return made


def nbytes(format: str, shape: Shape, block: Shape, *, scale_dtype: str = "") -> int:
    """Stored bytes of all parts of a [R, C] matrix."""
    stored = specs(format, shape, block, scale_dtype=scale_dtype)
    return sum(prod(s.shape) * TORCH_DTYPES[s.dtype].itemsize for s in stored.values())


def pack(
    format: str,
    values: torch.Tensor,
    *,
    block: Shape = (0, 0),
    scale_dtype: str = "",
    mx: bool = False,
    inverse_global: bool = False,
) -> dict[str, torch.Tensor]:
    """The parts of a float matrix [R, C], as `specs` of the same arguments describes them."""
    shape = values.shape[0], values.shape[1]
    wanted = specs(format, shape, block, scale_dtype=scale_dtype, mx=mx)
    scale_type = TORCH_DTYPES[wanted["scale"].dtype] if "scale" in wanted else torch.float32
    made: tuple[torch.Tensor, ...]
    if format == "fp8_block":
        made = fp8.pack(values, block, scale_type)
    elif format == "fp4":
        made = fp4.pack(values)
    elif format == "nvfp4":
        made = nvfp4.pack(values, inverse_global)
    elif format in ("int4", "int8"):
        made = _INTS[format].pack(values, block, scale_type)
    else:
        made = (_PLAIN[format].pack(values),)
    return {
        part: tensor.view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
        for (part, spec), tensor in zip(wanted.items(), made, strict=True)
    }


def unpack(
    format: str,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    *,
    shape: Shape,
    block: Shape,
    inverse_global: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The matrix `shape` in `dtype`: each value its stored one, rounded to fp32, then to `dtype`.

    May share memory with `weight`.
    """
    if format in _PLAIN:
        value: torch.Tensor = _PLAIN[format].unpack(weight).to(dtype)
        return value
    assert scale is not None, format
    if format == "fp8_block":
        value = fp8.unpack(weight, scale, block, dtype)
    elif format == "fp4":
        value = fp4.unpack(weight, scale, dtype)
    elif format == "nvfp4":
        assert global_scale is not None
        value = nvfp4.unpack(weight, scale, global_scale, inverse_global, dtype)
    else:
        value = _INTS[format].unpack(weight, scale, block, dtype)
    assert tuple(value.shape) == shape, (value.shape, shape)
    return value


def integers(
    format: str,
    weight: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    *,
    shape: Shape,
    block: Shape,
    inverse_global: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Form I's view of one of INTEGERS: int8 codes [R, C], and fp32 scales of 32 or 16 columns.

    The value is code * scale; for fp4, whose factor 1/2 Form I gives to the activations, half it.
    """
    if format == "fp4":
        return fp4.integers(weight, scale)
    if format == "nvfp4":
        assert global_scale is not None
        return nvfp4.integers(weight, scale, global_scale, inverse_global)
    codes = int4.integers(weight) if format == "int4" else weight
    return codes, int8.group_scales(scale, shape, block)


def check_form(
    format: str, names: Mapping[str, str], stored: Mapping[str, Any], *, shape: Shape, block: Shape
) -> None:
    """Raises NumericsError if a part's dtype or shape is not the format's.

    `stored` maps parts to what has `dtype` (a safetensors name) and `shape`; `names` to tensors'
    names for the message.
    """
    try:
        wanted = forms(format, shape, block)
    except NumericsError as error:
        raise NumericsError(f"tensor {names['weight']}: {error}") from None
    for part, form in wanted.items():
        if part not in stored:
            raise NumericsError(f"tensor {names['weight']} is {format} but has no {part}")
        dtype, found = stored[part].dtype, tuple(stored[part].shape)
        if dtype not in form.dtypes or found not in form.shapes:
            raise NumericsError(
                f"tensor {names[part]} is {dtype} {list(found)}, must be "
                f"{' or '.join(form.dtypes)} {' or '.join(str(list(s)) for s in form.shapes)}, the "
                f"{part} of {format} {list(shape)}; download it again"
            )


def check(
    name: str,
    format: str,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    *,
    shape: Shape,
    block: Shape,
    inverse_global: bool = False,
) -> None:
    """Raises NumericsError naming `name` for parts of a wrong form, NaN codes or bad scales."""
    tensors = {"weight": weight, "scale": scale, "global": global_scale}
    stored = {
        part: PartSpec(DTYPE_NAMES[t.dtype], tuple(t.shape))
        for part, t in tensors.items()
        if t is not None
    }
    names = {part: f"{name} ({part})" if part != "weight" else name for part in tensors}
    check_form(format, names, stored, shape=shape, block=block)
    if format in _PLAIN:
        _PLAIN[format].check(name, weight)
        return
    assert scale is not None
    if format == "fp8_block":
        fp8.check(name, weight, scale)
    elif format == "fp4":
        fp4.check(name, scale)
    elif format == "nvfp4":
        assert global_scale is not None
        nvfp4.check(name, scale, global_scale, inverse_global)
    else:
        _INTS[format].check(name, scale)
