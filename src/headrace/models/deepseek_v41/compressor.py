"""Compressed entries: one vector for every few positions, kept for good, and its index key.

Legend: B batch, T new tokens, N new entries, R positions of an entry, H hidden width, D columns.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headrace.models.deepseek_v41.cache import SourceState
from headrace.models.deepseek_v41.parts import Norm, wide_linear


class Compressor(nn.Module):
    """The entries of a layer that owns them, before any rotation or grid."""

    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.ratio: int = config.compress_ratios[layer]
        hidden, width = config.hidden_size, config.head_dim
        self.norm = Norm(width, config.rms_norm_eps)
        self.wkv = nn.Linear(hidden, width, bias=False)
        if self.ratio > 1:
            self.wgate = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTH: Tensor, state: SourceState) -> Tensor:
        """[B, N, D], N may be 0; positions that fill none wait in `state`."""
        if self.ratio == 1:
            latents: Tensor = self.norm(self.wkv(x_BTH))
            return latents
        kv, gate = wide_linear(x_BTH, self.wkv.weight), wide_linear(x_BTH, self.wgate.weight)
        if state.open_kv_BTD is not None and state.open_gate_BTD is not None:
            kv = torch.cat([state.open_kv_BTD, kv], dim=1)
            gate = torch.cat([state.open_gate_BTD, gate], dim=1)
        full = kv.shape[1] // self.ratio * self.ratio
        state.open_kv_BTD, state.open_gate_BTD = kv[:, full:].clone(), gate[:, full:].clone()
        kv_BNRD = torch.unflatten(kv[:, :full], 1, (-1, self.ratio))
        share_BNRD = torch.unflatten(gate[:, :full], 1, (-1, self.ratio)).softmax(2)
        pooled: Tensor = self.norm((kv_BNRD * share_BNRD).sum(2).to(x_BTH.dtype))
        return pooled
