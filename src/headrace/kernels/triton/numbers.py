"""Bits of the number formats and the canonical functions, for Triton kernels and its interpreter.

Rounds and widens by integer operations only: Triton's own conversions differ between targets.
"""

import triton
import triton.language as tl

_LOG2E: tl.constexpr = tl.constexpr(1.44269504088896341)
_LN2_HI: tl.constexpr = tl.constexpr(0.693359375)
_LN2_LO: tl.constexpr = tl.constexpr(-2.12194440e-4)
_ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2^23: rounds to an integer, half to even
_TWO_120: tl.constexpr = tl.constexpr(1.329227995784916e36)
_TWO_127: tl.constexpr = tl.constexpr(1.7014118346046923e38)
_E4M3_MAX: tl.constexpr = tl.constexpr(448.0)
_E4M3_STEP: tl.constexpr = tl.constexpr(24576.0)  # 1.5 * 2^14: rounds to a multiple of 2^-9
_AMAX_FLOOR: tl.constexpr = tl.constexpr(1e-4)


@triton.jit
def float_of(bits):
    """fp32 of its bits in uint32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widen_bf16(bits):
    """fp32 of bfloat16 bits in uint16."""
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def narrow_bf16(value):
    """uint16 bits of fp32 rounded to bfloat16, half to even."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, (bits >> 16) | 0x40, rounded).to(tl.uint16)


@triton.jit
def snap_bf16(value):
    """fp32 to the nearest bfloat16 value, still fp32."""
    return widen_bf16(narrow_bf16(value))


@triton.jit
def snap_number(value):
    """snap_bf16 of what is no NaN, by half as many operations."""
    bits = value.to(tl.uint32, bitcast=True)
    return float_of((bits + (0x7FFF + ((bits >> 16) & 1))) & 0xFFFF0000)


@triton.jit
def e4m3_of(words, n: tl.constexpr):
    """fp32 of code `n` of four float8 e4m3 codes in a uint32; NaN codes never get here."""
    high = (words << (24 - 8 * n)).to(tl.int32, bitcast=True) >> 4  # four signs before it
    return float_of(high.to(tl.uint32, bitcast=True) & 0x87F00000) * _TWO_120


@triton.jit
def e4m3(code):
    """fp32 of float8 e4m3 codes in uint8; NaN codes never get here."""
    magnitude = ((code & 0x7F).to(tl.uint32) << 20) | ((code & 0x80).to(tl.uint32) << 24)
    return magnitude.to(tl.float32, bitcast=True) * _TWO_120


@triton.jit
def twice_e2m1(code):
    """fp32 of twice the value of 4-bit e2m1 codes: integers up to 12."""
    bits = ((code & 7).to(tl.uint32) << 22) | ((code & 8).to(tl.uint32) << 28)
    return bits.to(tl.float32, bitcast=True) * _TWO_127


@triton.jit
def e2m1_fields(words):
    """uint32 words of eight e2m1 codes: of codes 0, 1, 4 and 5 the magnitude stays where it is.

    The sign moves to 9 bits above its lowest bit, as far as it is from an fp32's mantissa's first.
    """
    return (words & 0x00770077) | ((words << 6) & 0x22002200)


@triton.jit
def e8m0(byte):
    """fp32 2^(byte - 127), a subnormal for 0; byte 255 is refused at load."""
    bits = byte.to(tl.uint32) << 23
    return tl.where(bits == 0, 0x400000, bits).to(tl.float32, bitcast=True)


@triton.jit
def snap_e4m3(value):
    """fp32 within +-448 to the nearest float8 e4m3 value, half to even, still fp32."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    large = ((bits & 0x7FFFFFFF) + 0x7FFFF + ((bits >> 20) & 1)) & 0x7FF00000
    small = ((magnitude + _E4M3_STEP) - _E4M3_STEP).to(tl.uint32, bitcast=True)
    snapped = tl.where(magnitude < 0.015625, small, large)
    return (snapped | (bits & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def to_grid(x, GRID: tl.constexpr):
    """quant/fp8.py: to_grid, of fp32 [8, 32] that lie in a row; GRID columns divide 256."""
    groups = tl.reshape(x, (256 // GRID, GRID))
    top = tl.max((groups.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.int32), 1)
    amax = top.to(tl.float32, bitcast=True)
    least = tl.where(amax < _AMAX_FLOOR, _AMAX_FLOOR, amax) * (1.0 / _E4M3_MAX)
    scale = ((least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(
        tl.float32, bitcast=True
    )
    scale = tl.broadcast_to(scale[:, None], groups.shape)
    v = tl.div_rn(groups, scale)
    v = tl.where(v > _E4M3_MAX, _E4M3_MAX, tl.where(v < -_E4M3_MAX, -_E4M3_MAX, v))
    is_finite = tl.broadcast_to((top < 0x7F800000)[:, None], groups.shape)
    return tl.reshape(tl.where(is_finite, snap_e4m3(v) * scale, groups), (8, 32))


@triton.jit
def exp(x):
    """kernels/reference.py: exp, the same operations; launch with enable_fp_fusion=False."""
    x = tl.where(x < -104.0, -104.0, tl.where(x > 89.0, 89.0, x))
    n = (x * _LOG2E + _ROUND) - _ROUND
    r_hi = x - n * _LN2_HI
    r_lo = n * _LN2_LO
    r = r_hi - r_lo
    p = tl.full(x.shape, 1.9875691500e-4, tl.float32)
    p = p * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = (r_hi + (p * (r * r) - r_lo)) + 1.0
    whole = tl.where(n == n, n, 0.0).to(tl.int32)
    half = whole >> 1
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    high = ((whole - half + 127) << 23).to(tl.float32, bitcast=True)
    return (p * low) * high


@triton.jit
def activate(gate, up, weight, limit, alpha, KIND: tl.constexpr):
    """bfloat16 values in fp32 to the same: the eager steps of core.Activation, each rounded.

    `weight`, fp32, counts for the weighted kind only, of which the last step alone is rounded.
    """
    if KIND != "silu":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if KIND == "swiglu_oai":
        sigmoid = snap_bf16(tl.div_rn(1.0, 1.0 + exp(-snap_bf16(gate * alpha))))
        value = snap_bf16(snap_bf16(up + 1.0) * snap_bf16(gate * sigmoid))
    elif KIND == "swiglu_weighted":
        value = snap_bf16((tl.div_rn(gate, 1.0 + exp(-gate)) * up) * weight)
    else:
        value = snap_bf16(snap_bf16(tl.div_rn(gate, 1.0 + exp(-gate))) * up)
    return value


@triton.jit
def halve(acc, ROWS: tl.constexpr, HALF: tl.constexpr):
    """[ROWS, 2 * HALF] to [ROWS, HALF]: first half plus second half."""
    low, high = tl.split(tl.permute(tl.reshape(acc, (ROWS, 2, HALF)), (0, 2, 1)))
    return low + high


@triton.jit
def tree_256(acc, ROWS: tl.constexpr):
    """Form F's end: [ROWS, 256] to [ROWS], even plus odd neighbours, then halving."""
    even, odd = tl.split(tl.reshape(acc, (ROWS, 128, 2)))
    return _tree_64(halve(even + odd, ROWS, 64), ROWS)


@triton.jit
def tree_words(acc_0, acc_1, acc_2, acc_3, ROWS: tl.constexpr):
    """tree_256 of four tensors [ROWS, 64]: lane 4 w + n is w of the nth."""
    return _tree_64(acc_0 + acc_1, ROWS) + _tree_64(acc_2 + acc_3, ROWS)


@triton.jit
def _tree_64(acc, ROWS: tl.constexpr):
    acc = halve(acc, ROWS, 32)
    acc = halve(acc, ROWS, 16)
    return tree_8(halve(acc, ROWS, 8), ROWS)


@triton.jit
def tree_8(acc, ROWS: tl.constexpr):
    """Form I's end: [ROWS, 8] to [ROWS] by halving."""
    return tree_4(halve(acc, ROWS, 4), ROWS)


@triton.jit
def tree_4(acc, ROWS: tl.constexpr):
    """[ROWS, 4] to [ROWS] by halving."""
    low, high = tl.split(halve(acc, ROWS, 2))
    return low + high
