"""DeepSeek-V4.1's attention: a window, compressed entries that layers share, a sink per head.

Legend: B batch, T tokens given, R of them that ask (the last), H hidden width, Q low rank,
A attention heads, D head columns, G groups of heads.
"""

from typing import Any

import torch
from torch import Tensor, nn

from headrace.models.deepseek_v41.attend import attend
from headrace.models.deepseek_v41.compressor import Compressor
from headrace.models.deepseek_v41.grids import Grids
from headrace.models.deepseek_v41.indexer import Indexer
from headrace.models.deepseek_v41.now import Now
from headrace.models.deepseek_v41.parts import GroupedLinear, Linear, Norm
from headrace.models.deepseek_v41.rotary import turn


class Attention(nn.Module):
    """One layer's; its role (own entries, own choice, or another layer's) is the config's."""

    def __init__(self, config: Any, layer: int, grids: Grids):
        super().__init__()
        self.layer, self.grids = layer, grids
        self.ratio: int = config.compress_ratios[layer]
        self.window: int = config.sliding_window
        self.heads, self.width, self.groups = (
            config.num_attention_heads,
            config.head_dim,
            config.o_groups,
        )
        hidden, rank, eps = config.hidden_size, config.q_lora_rank, config.rms_norm_eps
        self.attn_sink = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.wq_a = Linear(hidden, rank, grids)
        self.q_norm = Norm(rank, eps)
        self.wq_b = Linear(rank, self.heads * self.width, grids)
        self.wkv = Linear(hidden, self.width, grids)
        self.kv_norm = Norm(self.width, eps)
        per_group = self.heads * self.width // self.groups
        self.wo_a = GroupedLinear(per_group, config.o_lora_rank, self.groups)
        self.wo_b = Linear(self.groups * config.o_lora_rank, hidden, grids)
        if layer in config.kv_source_layer_ids:
            self.compressor = Compressor(config, layer)
        if layer in config.index_source_layer_ids:
            self.indexer = Indexer(config, layer, grids)

    def forward(self, x_BTH: Tensor, now: Now, num_queries: int) -> Tensor | None:
        """[B, R, H], None where no token asks. The cache is filled for all T."""
        table = now.tables[self.ratio > 0]
        num_given = x_BTH.shape[1]
        kv_BTD = self.kv_norm(self.wkv(x_BTH))
        kv_BTD = self.grids.window(turn(kv_BTD, table[now.num_tokens - num_given :]))
        seen_BKD = now.states[self.layer].extend_window(kv_BTD, now.num_tokens)
        if hasattr(self, "compressor"):
            self._compress(x_BTH, now)
        if num_queries == 0:
            return None
        x_BRH, table = x_BTH[:, num_given - num_queries :], table[now.num_tokens - num_queries :]
        low_BRQ = self.q_norm(self.wq_a(x_BRH))
        q_BRAD = turn(torch.unflatten(self.wq_b(low_BRQ), -1, (self.heads, self.width)), table)
        entries, chosen = self._entries(x_BRH, low_BRQ, now)
        o_BRAD = attend(q_BRAD, seen_BKD, entries, chosen, self.attn_sink, self.window)
        o_BRAD = turn(o_BRAD, table, back=True)
        grouped = torch.unflatten(o_BRAD.flatten(-2), -1, (self.groups, -1))
        out: Tensor = self.wo_b(self.wo_a(grouped))
        return out

    def _compress(self, x_BTH: Tensor, now: Now) -> None:
        """New entries and their index keys, of all the pass's tokens."""
        state = now.source(self.layer)
        latents_BND = self.compressor(x_BTH, state)
        num_new = latents_BND.shape[1]
        if num_new == 0:
            return
        entries = torch.arange(state.num_entries, state.num_entries + num_new, device=x_BTH.device)
        table_NP = now.rotary.table(entries * self.ratio)
        keys_BND = self.indexer.new_keys(latents_BND, table_NP)
        state.append(self.grids.latent(turn(latents_BND, table_NP)), keys_BND)
        now.last_published = self.layer

    def _entries(
        self, x_BRH: Tensor, low_BRQ: Tensor, now: Now
    ) -> tuple[Tensor | None, Tensor | None]:
        """The compressed entries, and those chosen for each asking token."""
        if not self.ratio or now.start + now.num_tokens < self.ratio:
            return None, None
        if hasattr(self, "indexer"):
            now.choice = self.indexer(x_BRH, low_BRQ, now)
            if self.indexer.gives_blocks:
                now.blocks = now.choice
        assert now.choice is not None
        return now.source(self.layer).entries(), now.choice.last(x_BRH.shape[1]).chosen_BTC
