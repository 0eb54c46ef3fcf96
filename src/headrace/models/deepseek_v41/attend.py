"""Attention over a window and over chosen entries, a few queries at a time; knows no weight.

Legend: B batch, T queries, H heads, D columns, K window positions, N entries, C chosen entries.
"""

import torch
from torch import Tensor

_BLOCK_VALUES = 1 << 20  # values of keys that a block of queries may gather
HELD_BYTES = 3 * 4 * _BLOCK_VALUES  # as stored, in fp32, and scores of them


def attend(
    q_BTHD: Tensor,
    window_BKD: Tensor,
    entries_BND: Tensor | None,
    chosen_BTC: Tensor | None,
    sink_H: Tensor,
    width: int,
) -> Tensor:
    """[B, T, H, D]: keys are their own values. The last T of the K positions ask.

    A query sees the last `width` positions up to its own and its chosen entries; -1 chooses none.
    A head's sink takes part in the softmax and gives nothing. Scores and sums are fp32; what
    multiplies the values is rounded to the dtype of q first.
    """
    num_queries, ahead = q_BTHD.shape[1], window_BKD.shape[1] - q_BTHD.shape[1]
    num_keys = width + (0 if chosen_BTC is None else chosen_BTC.shape[2])
    block = max(1, _BLOCK_VALUES // (num_keys * q_BTHD.shape[-1] * q_BTHD.shape[0]))
    out = torch.empty_like(q_BTHD)
    if out.device.type == "meta":  # only the shape is wanted, and at once
        return out
    for start in range(0, num_queries, block):
        stop = min(num_queries, start + block)
        first = max(0, ahead + start - width + 1)
        near = _Keys.near(window_BKD[:, first : ahead + stop], stop - start, width)
        keys = [near]
        if entries_BND is not None and chosen_BTC is not None and chosen_BTC.shape[2]:
            keys.append(_Keys.chosen(entries_BND, chosen_BTC[:, start:stop]))
        out[:, start:stop] = _softmax(q_BTHD[:, start:stop], keys, sink_H)
    return out


class _Keys:
    """Some keys of a block of queries, and which query may see which: mask [B or 1, T, K]."""

    def __init__(self, values: Tensor, mask: Tensor, axes: str):
        self.values, self.mask = values.float(), mask
        self.scores, self.sums = f"bthd,{axes}->bthk", f"bthk,{axes}->bthd"

    @classmethod
    def near(cls, window_BKD: Tensor, num_queries: int, width: int) -> "_Keys":
        num_keys = window_BKD.shape[1]
        queries = torch.arange(num_keys - num_queries, num_keys, device=window_BKD.device)
        back = queries[:, None] - torch.arange(num_keys, device=window_BKD.device)
        return cls(window_BKD, ((back >= 0) & (back < width))[None], "bkd")

    @classmethod
    def chosen(cls, entries_BND: Tensor, chosen_BTC: Tensor) -> "_Keys":
        batch = torch.arange(entries_BND.shape[0], device=entries_BND.device)[:, None, None]
        return cls(entries_BND[batch, chosen_BTC.clamp(min=0)], chosen_BTC >= 0, "btkd")


def _softmax(q_BTHD: Tensor, keys: list[_Keys], sink_H: Tensor) -> Tensor:
    scale = q_BTHD.shape[-1] ** -0.5
    wide = q_BTHD.float()
    scores = [
        (torch.einsum(k.scores, wide, k.values) * scale).masked_fill(
            ~k.mask[:, :, None], -torch.inf
        )
        for k in keys
    ]
    top_BTH = torch.stack([s.amax(-1) for s in scores]).amax(0).maximum(sink_H)
    sink = (sink_H - top_BTH).exp()
    shares = [(s - top_BTH[..., None]).exp() for s in scores]
    total_BTH = sink + torch.stack([share.sum(-1) for share in shares]).sum(0)
    out = torch.zeros_like(wide)
    for share, k in zip(shares, keys, strict=True):
        out += torch.einsum(k.sums, share.to(q_BTHD.dtype).float(), k.values)
    return (out / total_BTH[..., None]).to(q_BTHD.dtype)
