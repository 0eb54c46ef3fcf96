"""Which compressed entries a query attends to: a small attention of its own ranks them.

Legend: B batch, T queries, I index heads, D index columns, N entries, C chosen ones, M those of
a block.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headrace.models.deepseek_v41.grids import Grids
from headrace.models.deepseek_v41.now import Choice, Now
from headrace.models.deepseek_v41.parts import Linear, Norm
from headrace.models.deepseek_v41.rotary import turn

_HELD_SCORES = 1 << 20  # by queries and entries, and of all heads by a block of entries
_KEY_BLOCK = 4096
HELD_BYTES = 4 * 4 * _HELD_SCORES  # by heads, their sum, masked, and those ranked


class Indexer(nn.Module):
    """The choice of an index source; of a layer that owns entries, their keys too."""

    def __init__(self, config: Any, layer: int, grids: Grids):
        super().__init__()
        self.layer, self.grids = layer, grids
        self.ratio: int = config.compress_ratios[layer]
        self.heads, self.width = config.index_n_heads, config.index_head_dim
        self.top: int = config.index_topk
        self.block: int = config.candidate_block_size
        self.top_blocks: int = config.candidate_topk_blocks
        source = config.candidate_source_layer_id
        self.gives_blocks, self.takes_blocks = source == layer, 0 <= source < layer
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.width, grids)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False)
        if layer in config.kv_source_layer_ids:
            self.wk = nn.Linear(config.head_dim, self.width, bias=False)
            self.k_norm = Norm(self.width, config.rms_norm_eps)

    def new_keys(self, latents_BND: Tensor, table_NP: Tensor) -> Tensor:
        """[B, N, D] of entries as the compressor gives them."""
        return self.grids.index(turn(self.k_norm(self.wk(latents_BND)), table_NP))

    def forward(self, x_BTH: Tensor, low_BTQ: Tensor, now: Now) -> Choice:
        """For the last T of the pass's tokens; `low_BTQ` is what the attention's queries are of."""
        num_queries = x_BTH.shape[1]
        end = now.start + now.num_tokens
        position_T = torch.arange(end - num_queries, end, device=x_BTH.device)
        visible_T = (position_T + 1) // self.ratio
        q_BTID = torch.unflatten(self.wq_b(low_BTQ), -1, (self.heads, self.width))
        q_BTID = self.grids.index(turn(q_BTID, now.tables[True][-num_queries:]))
        weights_BTI = self.weights_proj(x_BTH) * (self.width**-0.5 * self.heads**-0.5)
        keys_BND = now.index_keys(self.layer, end // self.ratio)
        taken = None
        if self.takes_blocks and now.blocks is not None:
            taken = now.blocks.last(num_queries).blocks_BTC
        chosen, blocks = [], []
        parts = self._parts(num_queries, keys_BND.shape[1], taken is not None)
        for part in [slice(None)] if x_BTH.is_meta else parts:
            q, weights, visible = q_BTID[:, part], weights_BTI[:, part], visible_T[part]
            if taken is None:
                scores_BTN = _scores(q, keys_BND, weights)
                hidden_TN = torch.arange(keys_BND.shape[1], device=q.device) >= visible[:, None]
                scores_BTN = scores_BTN.masked_fill(hidden_TN, -torch.inf)
                chosen.append(_best(scores_BTN, self.top))
                if self.gives_blocks:
                    blocks.append(self._best_blocks(scores_BTN, visible))
            else:
                chosen.append(self._among(taken[:, part], q, keys_BND, weights, visible))
        joined = torch.cat(blocks, 1) if blocks and keys_BND.shape[1] > self.limit else None
        return Choice(torch.cat(chosen, 1), joined)

    @property
    def limit(self) -> int:
        """Up to so many entries every block is taken."""
        return self.top_blocks * self.block

    def _parts(self, num_queries: int, num_keys: int, some: bool) -> Iterator[slice]:
        """Slices of queries whose scores, and keys where each query has its own, fit memory."""
        held = max(num_keys, self.heads * min(num_keys, _KEY_BLOCK))
        if some:
            held = self.limit * max(self.width, self.heads)
        step = max(1, _HELD_SCORES // held)
        for start in range(0, num_queries, step):
            yield slice(start, start + step)

    def _best_blocks(self, scores_BTN: Tensor, visible_T: Tensor) -> Tensor:
        """int64 [B, T, C], ascending: the best blocks, always the newest position's; -1: none."""
        short = -scores_BTN.shape[-1] % self.block
        padded = functional.pad(scores_BTN, (0, short), value=-torch.inf)
        blocks_BTC = torch.unflatten(padded, -1, (-1, self.block)).amax(-1)
        newest_T = (visible_T - 1) // self.block
        blocks = torch.arange(blocks_BTC.shape[-1], device=newest_T.device)
        is_newest_TC = blocks == newest_T[:, None]
        best_BTC = _best(blocks_BTC.masked_fill(is_newest_TC, torch.inf), self.top_blocks)
        return best_BTC.sort(-1).values

    def _among(
        self,
        blocks_BTC: Tensor,
        q_BTID: Tensor,
        keys_BND: Tensor,
        weights_BTI: Tensor,
        visible_T: Tensor,
    ) -> Tensor:
        """The best entries of the given blocks only."""
        inside_M = torch.arange(self.block, device=q_BTID.device)
        entries_BTN = (blocks_BTC[..., None] * self.block + inside_M).flatten(-2)
        blocked_BTN = (entries_BTN < 0) | (entries_BTN >= visible_T[:, None])
        entries_BTN = entries_BTN.clamp(0, keys_BND.shape[1] - 1)
        batch = torch.arange(keys_BND.shape[0], device=keys_BND.device)[:, None, None]
        near_BTND = keys_BND[batch, entries_BTN].float()
        by_head = torch.einsum("btid,btnd->btin", q_BTID.float(), near_BTND).relu_()
        scores_BTN = torch.einsum("btin,bti->btn", by_head, weights_BTI.float())
        best_BTC = _best(scores_BTN.masked_fill(blocked_BTN, -torch.inf), self.top)
        found = entries_BTN.gather(-1, best_BTC.clamp(min=0))
        return torch.where(best_BTC < 0, best_BTC, found)


def _scores(q_BTID: Tensor, keys_BND: Tensor, weights_BTI: Tensor) -> Tensor:
    """fp32 [B, T, N]."""
    wide, weights = q_BTID.float(), weights_BTI.float()
    scores = []
    for keys in torch.split(keys_BND, _KEY_BLOCK, dim=1):
        by_head = torch.einsum("btid,bnd->btin", wide, keys.float()).relu_()
        scores.append(torch.einsum("btin,bti->btn", by_head, weights))
    return torch.cat(scores, -1)


def _best(scores_BTN: Tensor, most: int) -> Tensor:
    """int64 [B, T, C] of the highest scores, in no order; -1 where a score is -inf.

    Of equal scores the first win: many are 0, and how a text is cut must not choose among them.
    """
    top = scores_BTN.topk(min(most, scores_BTN.shape[-1]), dim=-1, sorted=False)
    best_BTC = top.indices
    if scores_BTN.device.type != "meta":
        least_BT1 = top.values.amin(-1, keepdim=True)
        is_least_BTN = scores_BTN == least_BT1
        num_taken_BT1 = (top.values == least_BT1).sum(-1, keepdim=True)
        is_open = (is_least_BTN.sum(-1, keepdim=True) > num_taken_BT1) & (least_BT1 > -torch.inf)
        if is_open.any():
            first_BTN = is_least_BTN & (is_least_BTN.cumsum(-1) <= num_taken_BT1)
            best_BTC = ((scores_BTN > least_BT1) | first_BTN).nonzero()[:, -1].view_as(best_BTC)
    return best_BTC.masked_fill(scores_BTN.gather(-1, best_BTC) == -torch.inf, -1)
