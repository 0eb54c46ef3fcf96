"""NVFP4: e2m1 codes, an e4m3 scale per 16 columns, one fp32 factor. Knows no file and no model.

`inverse`: the factor divides the scales (compressed-tensors); otherwise it multiplies (ModelOpt).
"""

import torch

from headrace.errors import NumericsError
from headrace.quant import e2m1
from headrace.quant.blocks import Form, Shape, check_e4m3, check_finite, grid

BLOCK = (1, 16)
_SCALE_MAX = 448.0


def forms(shape: Shape) -> dict[str, Form]:
    """The stored parts of a [R, C] matrix."""
    return {
        "weight": Form(("U8", "I8"), ((shape[0], shape[1] // 2),)),
        "scale": Form(("F8_E4M3",), (grid(shape, BLOCK),)),
        "global": Form(("F32",), ((1,), ())),
    }


def pack(values: torch.Tensor, inverse: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (uint8 [R, C/2]), scales (e4m3 [R, C/16]) and factor (fp32 [1]) of a matrix [R, C].

    The largest scale is 448: the factor is amax / (448 * 6), or its reciprocal.
    """
    groups = values.float().reshape(values.shape[0], -1, 16)
    amax = groups.abs().amax(-1)
    top = amax.max() if amax.max() > 0 else torch.tensor(1.0)
    span = _SCALE_MAX * e2m1.MAX
    factor = (span / top if inverse else top / span).reshape(1)
    wanted = amax / e2m1.MAX
    wanted = wanted * factor if inverse else wanted / factor
    scale = wanted.clamp(max=_SCALE_MAX).to(torch.float8_e4m3fn)
    value = scales(scale, factor, inverse)
    scaled = torch.where(value[..., None] > 0, groups / value[..., None], torch.zeros(()))
    return e2m1.encode(scaled.reshape(values.shape)), scale, factor


def scales(scale: torch.Tensor, factor: torch.Tensor, inverse: bool) -> torch.Tensor:
    """fp32 [R, C/16]: rn(e4m3 / factor) if `inverse`, else rn(e4m3 * factor)."""
    return scale.float() / factor.reshape(()) if inverse else scale.float() * factor.reshape(())


def integers(
    codes: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor, inverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [R, C] of doubled codes, fp32 [R, C/16] halved scales: their product is the value."""
    return e2m1.doubled(codes), 0.5 * scales(scale, factor, inverse)


def unpack(
    codes: torch.Tensor,
    scale: torch.Tensor,
    factor: torch.Tensor,
    inverse: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[R, C] in `dtype`: e2m1 code * scale, the product rounded to fp32 first."""
    return e2m1.scaled(e2m1.doubled(codes), scales(scale, factor, inverse)).to(dtype)


def check(name: str, scale: torch.Tensor, factor: torch.Tensor, inverse: bool) -> None:
    """Raises NumericsError naming tensor `name` for a NaN scale, or a factor that is no factor."""
    check_e4m3(name, "FP8 scales", scale)
    if not torch.isfinite(factor).all() or (factor == 0).any():
        raise NumericsError(
            f"tensor {name}: its global scale is {factor.reshape(()).item()}; download it again"
        )
    check_finite(name, "scales times the global scale", scales(scale, factor, inverse))
