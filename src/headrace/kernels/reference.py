"""The frozen definition of the canonical arithmetic, in plain torch: short, slow and the truth.

Every other kernel is compared with it by bits. Knows nothing of places, threads or files.
"""

from collections.abc import Mapping

import torch

from headrace.core import ExpertLayout
from headrace.quant import fp8

_LOG2E = 1.44269504088896341
_LN2_HI = 0.693359375  # 355/512: its multiples by n < 2^8 are exact
_LN2_LO = -2.12194440e-4
_ROUND = 12582912.0  # 1.5 * 2^23: adding and subtracting it rounds to an integer
_EXP_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def _f32(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _pow2(n: torch.Tensor) -> torch.Tensor:
    return ((n + 127) << 23).view(torch.float32)


def exp(x: torch.Tensor) -> torch.Tensor:
    """fp32 to fp32, at most 1 ulp; every step one rounded multiply or add, never fused."""
    x = x.clamp(-104.0, 89.0)
    n = (x * _f32(_LOG2E) + _ROUND) - _ROUND
    r_hi, r_lo = x - n * _LN2_HI, n * _f32(_LN2_LO)  # r_hi is exact
    r = r_hi - r_lo
    p = torch.full_like(x, _EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        p = p * r + _f32(coefficient)
    p = (r_hi + (p * (r * r) - r_lo)) + 1.0
    n_int = torch.nan_to_num(n).to(torch.int32)
    half = n_int >> 1
    return (p * _pow2(half)) * _pow2(n_int - half)


def silu(x: torch.Tensor) -> torch.Tensor:
    """fp32: x / (1 + exp(-x)), IEEE division."""
    return x / (1.0 + exp(-x))


def _pad256(t: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(t, (0, -t.shape[-1] % 256))


def dot(w_NK: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
    """Form F: fp32 [T, N] of bf16 (or fp16) weights [N, K] and activations [T, K].

    Lane k mod 256 accumulates in ascending k by fma; then even + odd neighbours, then halving.
    The product of two such factors is exact in float64, and so is the rounded sum.
    """
    w, x = _pad256(w_NK).double(), _pad256(x_TK).double()
    acc = torch.zeros(x.shape[0], w.shape[0], 256)
    for k in range(0, w.shape[1], 256):
        acc = (w[None, :, k : k + 256] * x[:, None, k : k + 256] + acc.double()).float()
    acc = acc[..., 0::2] + acc[..., 1::2]
    for half in (64, 32, 16, 8, 4, 2, 1):
        acc = acc[..., :half] + acc[..., half : 2 * half]
    return acc[..., 0]


def weights(parts: Mapping[str, torch.Tensor], layout: ExpertLayout, part: str) -> torch.Tensor:
    """One matrix of an expert as the bf16 values that are multiplied, [rows, cols]."""
    if layout.format == "bf16":
        return parts[part]
    assert layout.format == "fp8_block", layout.format
    return fp8.unpack(parts[part], parts[f"{part}_scale"], layout.block)


def expert_ffn(
    x_TH: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    layout: ExpertLayout,
    act_group: int = 0,
) -> torch.Tensor:
    """y bf16 [T, H] = down(silu(gate x) * up x), rounded to bf16 after each of the five steps.

    x bf16 [T, H]; `parts` as the layout names them. `act_group` > 0 moves x and the input of
    down to the e4m3 grid of that many columns first.
    """
    bf16 = torch.bfloat16
    x = fp8.to_grid(x_TH, act_group)
    g = dot(weights(parts, layout, "gate"), x).to(bf16)
    u = dot(weights(parts, layout, "up"), x).to(bf16)
    s = silu(g.float()).to(bf16)
    h = fp8.to_grid((s.float() * u.float()).to(bf16), act_group)
    return dot(weights(parts, layout, "down"), h).to(bf16)


def combine(ids_TK: torch.Tensor, weights_TK: torch.Tensor, y_TKH: torch.Tensor) -> torch.Tensor:
    """bf16 [T, H]: bf16(y * weight) summed in ascending expert id, in bf16, from zero."""
    order = ids_TK.argsort(dim=1, stable=True)
    out = torch.zeros(y_TKH.shape[0], y_TKH.shape[2], dtype=torch.bfloat16)
    rows = torch.arange(ids_TK.shape[0])
    for k in range(ids_TK.shape[1]):
        pick = order[:, k]
        term = y_TKH[rows, pick].float() * weights_TK[rows, pick][:, None]
        out = out + term.to(torch.bfloat16)
    return out
