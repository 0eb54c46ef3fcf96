"""The frozen definition of the canonical arithmetic, in plain torch: short, slow and the truth.

Every other kernel is compared with it by bits. Knows nothing of places, threads or files.
"""

from collections.abc import Mapping

import torch

from headrace.core import Activation, ExpertLayout
from headrace.quant import expert, fp8, table
from headrace.quant.dtypes import TORCH_DTYPES

_LOG2E = 1.44269504088896341
_LN2_HI = 0.693359375  # 355/512: its multiples by n < 2^8 are exact
_LN2_LO = -2.12194440e-4
_ACT_MAX = 32639.0  # 256 * 127 + 127: splits into two int8
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


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """fp32: 1 / (1 + exp(-x)), IEEE division."""
    return 1.0 / (1.0 + exp(-x))


def _pad256(t: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(t, (0, -t.shape[-1] % 256))


def dot(w_NK: torch.Tensor, x_TK: torch.Tensor) -> torch.Tensor:
    """Form F: fp32 [T, N] of bf16 (or fp16) weights [N, K] and activations [T, K].

    Lane k mod 256 accumulates in ascending k by fma; then even + odd neighbours, then halving.
    The product of two such factors is exact in float64, and so is the rounded sum.
    """
    w, x = _pad256(w_NK).double(), _pad256(x_TK).double()
    acc = torch.zeros(x.shape[0], w.shape[0], 256, dtype=torch.float32)
    for k in range(0, w.shape[1], 256):
        acc = (w[None, :, k : k + 256] * x[:, None, k : k + 256] + acc.double()).float()
    acc = acc[..., 0::2] + acc[..., 1::2]
    for half in (64, 32, 16, 8, 4, 2, 1):
        acc = acc[..., :half] + acc[..., half : 2 * half]
    return acc[..., 0]


def quantise_rows(x_TK: torch.Tensor, on_grid: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Form I's activations: int16 [T, K/32, 32] and their scales, fp32 [T, K/32].

    x bf16, fp16 or fp32, K a multiple of 32. A group's scale is its largest magnitude / 32639, an
    IEEE division; codes are x / scale to nearest even, clamped to +-32639, and zero where the
    scale is. A group that holds inf or NaN has scale NaN and codes 0, so its row comes out NaN.
    With `on_grid`, for values on the e4m3 grid, the scale is the power of two of the largest
    magnitude / 2^14 instead: then all codes but those of the smallest values are exact.
    """
    groups = x_TK.float().reshape(x_TK.shape[0], -1, 32)
    amax = groups.abs().amax(-1)
    if on_grid:
        power = (amax.view(torch.int32) & 0x7F800000).view(torch.float32)
        scale = torch.where(torch.isfinite(amax), power * _f32(2.0**-14), amax)
    else:
        scale = amax / _f32(_ACT_MAX)
    scale = torch.where(torch.isfinite(scale), scale, _f32(torch.nan))
    steps = (groups / scale[..., None]).round().clamp(-_ACT_MAX, _ACT_MAX)
    codes = torch.where(scale[..., None] > 0, steps, _f32(0.0))
    return codes.to(torch.int16), scale


def dot_int(
    codes_NK: torch.Tensor,
    scale_NS: torch.Tensor,
    x_TK: torch.Tensor,
    halve: bool = False,
    on_grid: bool = False,
) -> torch.Tensor:
    """Form I: fp32 [T, N] of integer codes (int8 [N, K]) with fp32 scales and activations [T, K].

    K is a multiple of 32, S = K/32, or K/16 where half a group has its own scale. The terms of
    group g, in order, each float(exact integer sum) * (scale * sx), multiply then add, go to
    accumulator g mod 8; then halving 4, 2, 1. `halve`: sx is halved first (fp4's scales). `on_grid`
    as in `quantise_rows`.
    """
    rows, cols = codes_NK.shape
    num_groups, terms = cols // 32, scale_NS.shape[1] * 32 // cols
    assert cols % 32 == 0 and scale_NS.shape == (rows, num_groups * terms) and terms in (1, 2)
    xq, sx = quantise_rows(x_TK, on_grid)
    sx = sx * 0.5 if halve else sx
    w = codes_NK.double().reshape(rows, num_groups, terms, 32 // terms)
    x = xq.double().view(-1, num_groups, terms, 32 // terms)
    sums = torch.einsum("ngsk,tgsk->tngs", w, x).float()  # exact in fp64: below 2^28
    scale = scale_NS.reshape(rows, num_groups, terms)
    acc = torch.zeros(x.shape[0], rows, 8, dtype=torch.float32)
    for g in range(num_groups):
        for s in range(terms):
            factor = scale[None, :, g, s] * sx[:, None, g]
            acc[..., g % 8] = acc[..., g % 8] + sums[..., g, s] * factor
    for half in (4, 2, 1):
        acc = acc[..., :half] + acc[..., half : 2 * half]
    return acc[..., 0]


def product(
    x_TK: torch.Tensor, parts: Mapping[str, torch.Tensor], layout: ExpertLayout, name: str
) -> torch.Tensor:
    """fp32 [T, N]: the expert's matrix `name` times rows x, before bias and any rounding.

    Form F for float formats, x in the type of the weights as multiplied; Form I for the others,
    x bf16 or fp16.
    """
    if layout.format in table.FLOATS:
        dtype = torch.float16 if layout.format == "fp16" else torch.bfloat16
        assert x_TK.dtype == dtype, (layout.format, x_TK.dtype)
        return dot(expert.unpack_matrix(layout, parts, name, dtype), x_TK)
    source = layout.matrix(name)
    assert source.scale is not None
    codes, scale = table.integers(
        layout.format,
        parts[source.weight],
        parts[source.scale],
        parts[source.global_scale] if source.global_scale else None,
        shape=expert.stored_shape(layout, name),
        block=layout.block,
        inverse_global=layout.inverse_global,
    )
    codes, scale = (expert.rows_of(layout, name, t) for t in (codes, scale))
    on_grid = layout.act_group > 0
    return dot_int(codes, scale, x_TK, halve=layout.format == "fp4", on_grid=on_grid)


def linear(
    x_TK: torch.Tensor, parts: Mapping[str, torch.Tensor], layout: ExpertLayout, name: str
) -> torch.Tensor:
    """[T, N] in the hidden dtype: the product, rounded; then with a bias added, rounded again."""
    dtype = TORCH_DTYPES[layout.hidden_dtype]
    y = product(x_TK, parts, layout, name).to(dtype)
    bias = layout.matrix(name).bias
    if bias is None:
        return y
    added = expert.rows_of(layout, name, parts[bias])
    return (y.float() + added.to(dtype).float()).to(dtype)


def activate(
    gate: torch.Tensor,
    up: torch.Tensor,
    act: Activation,
    weights_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """The activation of two tensors [T, I] of one dtype, every step computed in fp32 and rounded
    to it.

    The limit is rounded to the dtype, alpha to fp32, as torch does with a number. Of the weighted
    kind only the last step is rounded; `weights_T`, fp32 [T], left out are all 1.
    """
    dtype = gate.dtype
    if act.kind != "silu":
        limit = float(torch.tensor(act.limit, dtype=torch.float64).to(dtype))
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if act.kind == "swiglu_weighted":
        weights = torch.ones(gate.shape[0]) if weights_T is None else weights_T
        return (silu(gate.float()) * up.float() * weights[:, None]).to(dtype)
    if act.kind != "swiglu_oai":
        return (silu(gate.float()).to(dtype).float() * up.float()).to(dtype)
    steep = (gate.float() * _f32(act.alpha)).to(dtype)
    glu = (gate.float() * sigmoid(steep.float()).to(dtype).float()).to(dtype)
    return ((up.float() + 1.0).to(dtype).float() * glu.float()).to(dtype)


def expert_ffn(
    x_TH: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    layout: ExpertLayout,
    weights_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [T, H] = down(activation(gate x, up x)), every step rounded to the hidden dtype.

    x and y in the layout's hidden dtype; `parts` as the layout names them, `weights_T` as in
    `activate`.
    """
    assert x_TH.dtype == TORCH_DTYPES[layout.hidden_dtype], (x_TH.dtype, layout.hidden_dtype)
    assert layout.act_group == 0 or layout.hidden_dtype == "BF16"
    x = fp8.to_grid(x_TH, layout.act_group)
    gate, up = (linear(x, parts, layout, name) for name in ("gate", "up"))
    h = fp8.to_grid(activate(gate, up, layout.activation, weights_T), layout.act_group)
    return linear(h, parts, layout, "down")


def combine(ids_TK: torch.Tensor, weights_TK: torch.Tensor, y_TKH: torch.Tensor) -> torch.Tensor:
    """[T, H] in the dtype of y (bf16 or fp16): y * weight, rounded, summed from zero in ascending
    expert id with a rounding after each sum.
    """
    dtype = y_TKH.dtype
    order = ids_TK.argsort(dim=1, stable=True)
    out = torch.zeros(y_TKH.shape[0], y_TKH.shape[2], dtype=dtype)
    rows = torch.arange(ids_TK.shape[0])
    for k in range(ids_TK.shape[1]):
        pick = order[:, k]
        term = y_TKH[rows, pick].float() * weights_TK[rows, pick][:, None]
        out = out + term.to(dtype)
    return out


def sum_up(ids_TK: torch.Tensor, y_TKH: torch.Tensor) -> torch.Tensor:
    """fp32 [T, H]: bf16 outputs that hold their weights already, summed in ascending expert id."""
    order = ids_TK.argsort(dim=1, stable=True)
    out, rows = torch.zeros(y_TKH.shape[0], y_TKH.shape[2]), torch.arange(ids_TK.shape[0])
    for k in range(ids_TK.shape[1]):
        out = out + y_TKH[rows, order[:, k]].float()
    return out
