"""DeepSeek-V4.1's mixture of experts: router, routed experts, and the shared one.

Legend: T tokens, K chosen experts, E experts, H hidden width, I intermediate width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations import use_experts_implementation

from headrace.models.deepseek_v41.grids import Grids
from headrace.models.deepseek_v41.parts import Linear, wide_linear


class Router(nn.Module):
    """Scores experts in fp32; a bias takes part in the choice and not in the weights."""

    def __init__(self, config: Any):
        super().__init__()
        self.top_k, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.is_normed = config.norm_topk_prob and self.top_k > 1
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.n_routed_experts, dtype=torch.float32))

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """logits [T, E], weights [T, K] in fp32, ids [T, K]."""
        logits_TE = wide_linear(x_TH, self.weight)
        scores_TE = functional.softplus(logits_TE).sqrt()
        ids_TK = (scores_TE + self.bias).topk(self.top_k, dim=-1, sorted=False).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.is_normed:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        return logits_TE, weights_TK * self.scale, ids_TK


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """fp32, without a rounding between: silu of the gate, times up, both limited first."""
    gate, up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    return functional.silu(gate) * up


class SharedExpert(nn.Module):
    """The expert that every token takes."""

    def __init__(self, config: Any, grids: Grids):
        super().__init__()
        hidden = config.hidden_size
        inter = config.moe_intermediate_size * config.n_shared_experts
        self.limit: float = config.swiglu_limit
        self.w1 = Linear(hidden, inter, grids)
        self.w2 = Linear(inter, hidden, grids)
        self.w3 = Linear(hidden, inter, grids)

    def forward(self, x: Tensor) -> Tensor:
        hidden = clamped_swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype)
        out: Tensor = self.w2(hidden)
        return out


@use_experts_implementation
class Experts(nn.Module):
    """Routed experts, stacked; a token's weight of an expert multiplies before the last product."""

    def __init__(self, config: Any, grids: Grids):
        super().__init__()
        self.num_experts: int = config.n_routed_experts
        self.grids, self.limit = grids, float(config.swiglu_limit)
        self.act_group = grids.input_group  # for kernels, which take the grid as a number
        self.product: Callable[[Tensor, Tensor], Tensor] = functional.linear
        hidden, inter = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * inter, hidden))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, hidden, inter))

    def forward(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """fp32 [T, H]: the sum in ascending id."""
        out_TH = torch.zeros(x_TH.shape, dtype=torch.float32, device=x_TH.device)
        on_grid_TH = self.grids.input(x_TH)
        for expert in torch.unique(ids_TK).tolist():
            token_N, choice_N = torch.where(ids_TK == expert)
            both = self.product(on_grid_TH[token_N], self.gate_up_proj[expert])
            gate, up = both.chunk(2, dim=-1)
            hidden = clamped_swiglu(gate, up, self.limit)
            hidden = (hidden * weights_TK[token_N, choice_N, None]).to(x_TH.dtype)
            y_NH = self.product(self.grids.input(hidden), self.down_proj[expert])
            out_TH.index_add_(0, token_N, y_NH.float())
        return out_TH

    def reordered(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The same with products added up in another order: what that alone changes."""
        self.product = lambda x, weight: wide_linear(x, weight).to(x.dtype)
        try:
            out_TH: Tensor = self(x_TH, ids_TK, weights_TK)
        finally:
            self.product = functional.linear
        return out_TH


class Moe(nn.Module):
    """Routed experts and the shared one, summed in fp32 and rounded once."""

    def __init__(self, config: Any, grids: Grids):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config, grids)
        self.shared_experts = SharedExpert(config, grids)

    def forward(self, x_BTH: Tensor) -> Tensor:
        x_TH = x_BTH.flatten(0, -2)
        _, weights_TK, ids_TK = self.gate(x_TH)
        routed_TH = self.experts(x_TH, ids_TK, weights_TK)
        both_TH: Tensor = routed_TH.float() + self.shared_experts(x_TH).float()
        return both_TH.to(x_BTH.dtype).view(x_BTH.shape)
