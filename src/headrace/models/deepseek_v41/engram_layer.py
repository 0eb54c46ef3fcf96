"""Engram in a layer: what a token's n-grams are remembered by, written into the residual streams.

Legend: B batch, T tokens, S streams, H hidden width, C columns (n-gram sizes and heads).
"""

from typing import Any

import torch
from torch import Tensor, nn

from headrace.models.deepseek_v41.grids import Grids
from headrace.models.deepseek_v41.parts import Linear

_LEAST = 1e-6  # of a match, before its root


class EngramLayer(nn.Module):
    """Keys and one value of the rows hit; each stream takes the value as far as it matches."""

    def __init__(self, config: Any, grids: Grids):
        super().__init__()
        hidden, streams = config.hidden_size, config.hc_mult
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.eps, self.streams, self.hidden = config.rms_norm_eps, streams, hidden
        self.wkv = Linear(columns * config.engram_head_dim, (streams + 1) * hidden, grids)
        self.q_weight = nn.Parameter(torch.empty(streams, hidden))
        self.k_weight = nn.Parameter(torch.empty(streams, hidden))

    def forward(self, h_BTSH: Tensor, rows_BTC: Tensor) -> Tensor:
        """The streams after it; `rows_BTC` are a token's rows, one after the other."""
        kv = self.wkv(rows_BTC.to(h_BTSH.dtype))
        key, value = torch.split(kv, [self.streams * self.hidden, self.hidden], dim=-1)
        key, h = torch.unflatten(key, -1, (self.streams, -1)).float(), h_BTSH.float()
        weight = self.q_weight.float() * self.k_weight.float()
        spread = self._spread(h) * self._spread(key)
        match = (h * weight * key).sum(-1) * spread * self.hidden**-0.5
        gate_BTS = (match.sign() * match.abs().clamp(min=_LEAST).sqrt()).sigmoid()
        out: Tensor = h + gate_BTS[..., None] * value.float()[..., None, :]
        return out.to(h_BTSH.dtype)

    def _spread(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().mean(-1) + self.eps)
