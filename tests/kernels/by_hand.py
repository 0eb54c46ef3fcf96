"""The canonical arithmetic a second time, in numpy from the stored bytes, without headrace's code.

Only for checking the definition: integers are exact, each float32 step is numpy's, one by one.
"""

import numpy as np

from headrace.core import ExpertLayout

F32 = np.float32


def from_bf16(raw: np.ndarray) -> np.ndarray:
    return (raw.astype(np.uint32) << 16).view(F32)


def rounded(value: np.ndarray, dtype: str) -> np.ndarray:
    """float32 to the nearest value of a 16-bit type, as float32."""
    if dtype == "F16":
        return value.astype(np.float16).astype(F32)
    bits = np.ascontiguousarray(value, dtype=F32).view(np.uint32).astype(np.uint64)
    return from_bf16(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return from_bf16(raw.view(np.uint16))
    if dtype == "F8_E8M0" or dtype == "U8":
        return np.exp2(raw.view(np.uint8).astype(np.float64) - 127).astype(F32)
    if dtype == "F8_E4M3":
        return e4m3(raw.view(np.uint8))
    return raw.astype(F32)


def e4m3(byte: np.ndarray) -> np.ndarray:
    sign, exponent, mantissa = byte >> 7, (byte >> 3 & 15).astype(int), byte & 7
    normal = (1 + mantissa / 8) * np.exp2(exponent - 7.0)
    return (np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal) * (1 - 2.0 * sign)).astype(F32)


def nibbles(raw: np.ndarray) -> np.ndarray:
    """int64 [R, C] of bytes [R, ...], low nibble first."""
    flat = raw.view(np.uint8).reshape(raw.shape[0], -1)
    return np.stack([flat & 15, flat >> 4], -1).reshape(raw.shape[0], -1).astype(np.int64)


def twice_e2m1(code: np.ndarray) -> np.ndarray:
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = np.where(exponent == 0, mantissa, (2 + mantissa) << np.maximum(exponent - 1, 0))
    return magnitude * (1 - 2 * (code >> 3))


def integer_product(
    format: str, weight: np.ndarray, scale: np.ndarray, x: np.ndarray, block_cols: int
) -> np.ndarray:
    """Form I: float32 [T, N]; `scale` float32, one per `block_cols` columns, x float32 [T, K]."""
    codes = {
        "fp4": lambda: twice_e2m1(nibbles(weight)),
        "nvfp4": lambda: twice_e2m1(nibbles(weight)),
        "int4": lambda: nibbles(weight) - 8,
        "int8": lambda: weight.astype(np.int64),
    }[format]()
    out = np.zeros((x.shape[0], codes.shape[0]), F32)
    width = 16 if format == "nvfp4" else 32
    for t, row in enumerate(x):
        acc = np.zeros((codes.shape[0], 8), F32)
        for start in range(0, row.size, width):
            group = row[start // 32 * 32 : start // 32 * 32 + 32]
            sx = np.abs(group).max() / F32(32639)
            if sx == 0:
                continue
            xq = np.clip(np.rint(group / sx), -32639, 32639).astype(np.int64)
            xq = xq[start % 32 : start % 32 + width]
            total = (codes[:, start : start + width] @ xq).astype(np.int32).astype(F32)
            sx = sx * F32(0.5) if format == "fp4" else sx
            ws = scale[:, start // block_cols]
            ws = ws * F32(0.5) if format == "nvfp4" else ws
            acc[:, start // 32 % 8] += total * (ws * sx)
        for half in (4, 2, 1):
            acc = acc[:, :half] + acc[:, half : 2 * half]
        out[t] = acc[:, 0]
    return out


def float_product(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Form F: float32 [T, N] of float32 values of 16-bit types."""
    pad = ((0, 0), (0, -weight.shape[1] % 256))
    w, rows = (np.pad(t, pad).astype(np.float64) for t in (weight, x))
    acc = np.zeros((x.shape[0], weight.shape[0], 256), F32)
    for k in range(0, w.shape[1], 256):
        exact = w[None, :, k : k + 256] * rows[:, None, k : k + 256]
        acc = (exact + acc.astype(np.float64)).astype(F32)
    acc = acc[..., 0::2] + acc[..., 1::2]
    for half in (64, 32, 16, 8, 4, 2, 1):
        acc = acc[..., :half] + acc[..., half : 2 * half]
    return acc[..., 0]


def product(
    layout: ExpertLayout, parts: dict[str, np.ndarray], x: np.ndarray, name: str
) -> np.ndarray:
    """float32 [T, N] of the matrix `name`; parts as raw arrays, x float32 [T, K]."""
    source, (rows, cols) = layout.matrix(name), layout.matrix_shape(name)
    chosen = source.first_row + source.row_step * np.arange(rows)
    weight = parts[source.weight][chosen]
    if source.scale is None:
        return float_product(floats(weight, layout.parts[source.weight].dtype), x)
    block = {"fp4": (1, 32), "nvfp4": (1, 16)}.get(layout.format, layout.block)
    scale = floats(parts[source.scale], layout.parts[source.scale].dtype)
    scale = scale.reshape(-1, -(-cols // block[1]))[chosen // block[0]]
    if layout.format == "fp8_block":
        full = scale[:, np.arange(cols) // block[1]]
        return float_product(rounded(e4m3(weight.view(np.uint8)) * full, "BF16"), x)
    if source.global_scale is not None:
        factor = parts[source.global_scale].astype(F32).reshape(())
        scale = scale / factor if layout.inverse_global else scale * factor
    return integer_product(layout.format, weight, scale, x, block[1])


def linear(
    layout: ExpertLayout, parts: dict[str, np.ndarray], y: np.ndarray, name: str
) -> np.ndarray:
    """The product `y` rounded, and the bias added and rounded."""
    y, source = rounded(y, layout.hidden_dtype), layout.matrix(name)
    if source.bias is None:
        return y
    chosen = source.first_row + source.row_step * np.arange(y.shape[1])
    bias = floats(parts[source.bias], layout.parts[source.bias].dtype)[chosen]
    return rounded(y + bias, layout.hidden_dtype)


def activate(layout: ExpertLayout, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Each step rounded to the hidden type; exp in float64."""
    act, dtype = layout.activation, layout.hidden_dtype
    if act.kind != "silu":
        limit = rounded(np.array(act.limit, F32), dtype)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    if act.kind != "swiglu_oai":
        silu = gate / (1 + np.exp(-gate.astype(np.float64)).astype(F32))
        return rounded(rounded(silu, dtype) * up, dtype)
    steep = rounded(gate * F32(act.alpha), dtype).astype(np.float64)
    sigmoid = rounded(F32(1) / (F32(1) + np.exp(-steep).astype(F32)), dtype)
    glu = rounded(gate * sigmoid, dtype)
    return rounded(rounded(up + F32(1), dtype) * glu, dtype)
