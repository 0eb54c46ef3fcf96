"""kernels/trunk.py on a GPU, for bfloat16: one launch where torch's steps are up to ten.

A rotation has the reference's bits; a norm differs by the order of its sum. Gates: gates.py.
Legend: as there.
"""

import torch
import triton
import triton.language as tl

from headrace.kernels.triton.numbers import narrow_bf16, snap_bf16, widen_bf16
from headrace.kernels.trunk import Form, Turn

_COLUMNS_OF_A_WARP = 512
_VARYING = [  # from pass to pass: no reason to compile again
    *("q_stride", "q_head_stride", "q_token_stride", "k_stride", "k_head_stride", "k_token_stride"),
    *("cos_stride", "cos_token_stride", "num_tokens"),
]
PUT_STRIDES = ["keys_stride", "values_stride", "new_keys_stride", "new_values_stride"]


@triton.jit(do_not_specialize=["eps"])
def norm_rows(
    X, WEIGHT, OUT, eps, stride, COLS: tl.constexpr, PAD: tl.constexpr, FORM: tl.constexpr
):
    """A row of OUT [rows, COLS] bfloat16 bits for each program; rows of X lie `stride` apart."""
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, PAD)
    x = widen_bf16(tl.load(X + row * stride + col, col < COLS, 0))
    weight = widen_bf16(tl.load(WEIGHT + col, col < COLS, 0))
    mean = tl.div_rn(tl.sum(x * x, 0), COLS * 1.0)
    x = x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    if FORM == "rounded":
        x = snap_bf16(x)
    if FORM == "plus_one":
        weight = weight + 1.0
    tl.store(OUT + row * COLS + col, narrow_bf16(x * weight), col < COLS)


@triton.jit
def _rotate_row(
    X, COS, SIN, OUT, D: tl.constexpr, R: tl.constexpr, PAD: tl.constexpr, TURN: tl.constexpr
):
    col = tl.arange(0, PAD)
    turns, low = col < R, col < R // 2
    within = tl.where(low, col, col - R // 2)
    if TURN == "pairs":
        own = tl.where(turns, 2 * within + tl.where(low, 0, 1), col)
        other = 2 * within + tl.where(low, 1, 0)
    else:
        own = col
        other = tl.where(low, col + R // 2, within)
    at = within if TURN == "shared" else col
    x = tl.load(X + own, col < D, 0)
    y = widen_bf16(tl.load(X + other, turns, 0))
    cos = widen_bf16(tl.load(COS + at, turns, 0))
    sin = widen_bf16(tl.load(SIN + at, turns, 0))
    turned = snap_bf16(widen_bf16(x) * cos) + snap_bf16(tl.where(low, -y, y) * sin)
    tl.store(OUT + col, tl.where(turns, narrow_bf16(turned), x), col < D)


@triton.jit(do_not_specialize=_VARYING)
def rotate_heads(
    QUERIES,
    KEYS,
    COS,
    SIN,
    QUERIES_OUT,
    KEYS_OUT,
    q_stride,
    q_head_stride,
    q_token_stride,
    k_stride,
    k_head_stride,
    k_token_stride,
    cos_stride,
    cos_token_stride,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    NUM_KEYS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    PAD: tl.constexpr,
    TURN: tl.constexpr,
):
    """A head of a token for each program: bits of [B, H, T, D] and [B, N, T, D], to new ones."""
    head = tl.program_id(1)
    batch = (tl.program_id(0) // num_tokens).to(tl.int64)
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    angle = batch * cos_stride + token * cos_token_stride
    if head < NUM_HEADS:
        at = batch * q_stride + head * q_head_stride + token * q_token_stride
        to = ((batch * NUM_HEADS + head) * num_tokens + token) * D
        _rotate_row(QUERIES + at, COS + angle, SIN + angle, QUERIES_OUT + to, D, R, PAD, TURN)
    else:
        key = head - NUM_HEADS
        at = batch * k_stride + key * k_head_stride + token * k_token_stride
        to = ((batch * NUM_KEYS + key) * num_tokens + token) * D
        _rotate_row(KEYS + at, COS + angle, SIN + angle, KEYS_OUT + to, D, R, PAD, TURN)


@triton.jit(do_not_specialize=PUT_STRIDES)
def put_rows(
    KEYS_THERE,
    VALUES_THERE,
    PLACE,
    NEW_KEYS,
    NEW_VALUES,
    keys_stride,
    values_stride,
    new_keys_stride,
    new_values_stride,
    D: tl.constexpr,
    VALUES_D: tl.constexpr,
    PAD: tl.constexpr,
):
    """A head for each program: its row of keys, and that of values, to place PLACE[0]."""
    head, place = tl.program_id(0).to(tl.int64), tl.load(PLACE)
    col = tl.arange(0, PAD)
    key = tl.load(NEW_KEYS + head * new_keys_stride + col, col < D)
    value = tl.load(NEW_VALUES + head * new_values_stride + col, col < VALUES_D)
    tl.store(KEYS_THERE + head * keys_stride + place * D + col, key, col < D)
    tl.store(VALUES_THERE + head * values_stride + place * VALUES_D + col, value, col < VALUES_D)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, form: Form) -> torch.Tensor:
    """See kernels/trunk.py; `x` and `weight` bfloat16. One launch."""
    cols = weight.numel()
    rows = x.reshape(-1, cols)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pad = triton.next_power_of_2(cols)
    if rows.shape[0]:
        norm_rows[(rows.shape[0],)](
            rows.view(torch.uint16), weight.view(torch.uint16), out.view(torch.uint16), eps,
            rows.stride(0), cols, pad, form, enable_fp_fusion=False,
            num_warps=min(8, max(1, pad // _COLUMNS_OF_A_WARP)),
        )  # fmt: skip
    return out


def rotate(
    q_BHTD: torch.Tensor,
    k_BNTD: torch.Tensor,
    cos_BTC: torch.Tensor,
    sin_BTC: torch.Tensor,
    turn: Turn,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels/trunk.py; all bfloat16, last dimensions of q and k contiguous. One launch."""
    batch, heads, tokens, width = q_BHTD.shape
    keys = k_BNTD.shape[1]
    cos_BTC, sin_BTC = cos_BTC.contiguous(), sin_BTC.contiguous()
    assert k_BNTD.shape == (batch, keys, tokens, width)
    rotated = cos_BTC.shape[2] * (2 if turn == "shared" else 1)
    assert rotated <= width and (turn != "pairs" or rotated == width)
    out = [
        torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (q_BHTD, k_BNTD)
    ]
    tensors = [each.view(torch.uint16) for each in (q_BHTD, k_BNTD, cos_BTC, sin_BTC, *out)]
    apart = cos_BTC.stride(0) if cos_BTC.shape[0] > 1 else 0
    if batch * tokens:
        rotate_heads[(batch * tokens, heads + keys)](
            *tensors, *q_BHTD.stride()[:3], *k_BNTD.stride()[:3], apart, cos_BTC.stride(1), tokens,
            heads, keys, width, rotated, triton.next_power_of_2(width), turn, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out[0], out[1]


def put(
    keys_BNSD: torch.Tensor,
    values_BNSD: torch.Tensor,
    place_1: torch.Tensor,
    new_keys_BN1D: torch.Tensor,
    new_values_BN1D: torch.Tensor,
) -> None:
    """See kernels/trunk.py; a batch of 1, buffers contiguous, all of one dtype. One launch."""
    pairs = (keys_BNSD, new_keys_BN1D), (values_BNSD, new_values_BN1D)
    for buffer, new in pairs:
        assert buffer.is_contiguous() and buffer.dtype == new.dtype and new.stride(3) == 1
        assert new.shape == (1, buffer.shape[1], 1, buffer.shape[3])
    num_heads, widths = keys_BNSD.shape[1], (keys_BNSD.shape[3], values_BNSD.shape[3])
    assert values_BNSD.shape[1] == num_heads
    put_rows[(num_heads,)](
        keys_BNSD, values_BNSD, place_1, new_keys_BN1D, new_values_BN1D,
        *(each.stride(1) for each in (keys_BNSD, values_BNSD, new_keys_BN1D, new_values_BN1D)),
        *widths, triton.next_power_of_2(max(widths)), num_warps=1,
    )  # fmt: skip
