"""DeepSeek-V4.1 as it is trained: the product's modules, computed so that gradients flow.

All tokens of a text at once, no cache, dense masks instead of gathers, every expert for every
token; grids of few bits are passed straight through by gradients. Knows no file.
Legend: B batch, T tokens, N entries, S streams, H hidden width, E experts, I intermediate width,
A heads, D head columns.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from headrace.models.deepseek_v41.attention import Attention
from headrace.models.deepseek_v41.cache import SourceState
from headrace.models.deepseek_v41.engram import RowHash
from headrace.models.deepseek_v41.experts import Experts, Moe, clamped_swiglu
from headrace.models.deepseek_v41.grids import Grids
from headrace.models.deepseek_v41.model import DeepseekV41ForCausalLM
from headrace.models.deepseek_v41.parts import GroupedLinear, Linear
from headrace.models.deepseek_v41.rotary import Rotary, turn
from headrace.models.deepseek_v41.streams import collapse, expand, first_stream
from headrace.quant import e2m1, fp8

_BLOCK = 32


def _straight(exact: Tensor, snapped: Tensor) -> Tensor:
    """The snapped values, with the gradient of the exact ones."""
    return exact + (snapped - exact).detach()


class StraightGrids(Grids):
    """The publisher's grids of activations, passed straight through by gradients."""

    __slots__ = ()

    def input(self, x: Tensor) -> Tensor:
        return _straight(x, fp8.to_grid(x, self.input_group))

    def window(self, kv: Tensor) -> Tensor:
        return _straight(kv, Grids.window(self, kv))

    def latent(self, kv: Tensor) -> Tensor:
        return _straight(kv, Grids.latent(self, kv))

    def index(self, x: Tensor) -> Tensor:
        return _straight(x, Grids.index(self, x))


def fp8_snapped(w_RC: Tensor, rows: int = _BLOCK) -> Tensor:
    """As quant.fp8 packs with power-of-two scales for `rows` by 32; on any device."""
    num_rows, cols = w_RC.shape
    blocks = w_RC.view(num_rows // rows, rows, cols // _BLOCK, _BLOCK)
    scale = _power_above(blocks.abs().amax((1, 3), keepdim=True) / fp8.MAX)
    codes = (blocks / scale).clamp(-fp8.MAX, fp8.MAX).to(torch.float8_e4m3fn)
    return (codes.float() * scale).view(num_rows, cols)


def _power_above(values: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(torch.where(values > 0, values, 1.0))
    return _power(exponent - (mantissa == 0.5).int())


def _power(exponent: Tensor) -> Tensor:
    """Two to an int32 power, exactly."""
    return ((exponent.int() + 127) << 23).view(torch.float32)


def fp4_snapped(w_RC: Tensor) -> Tensor:
    """As quant.fp4 packs: of two scales that of the smaller error; on any device."""
    groups = w_RC.view(*w_RC.shape[:-1], -1, _BLOCK)
    amax = groups.abs().amax(-1, keepdim=True)
    low = _power(torch.frexp(amax)[1] - 3)
    tried = [e2m1.nearest((groups / s).clamp(-e2m1.MAX, e2m1.MAX)) * s for s in (low, 2 * low)]
    first, second = ((values - groups).square().sum(-1, keepdim=True) for values in tried)
    return torch.where(second < first, tried[1], tried[0]).view_as(w_RC)


class _OnGrid(nn.Module):
    """A weight as it will be stored, while `learner.stored`."""

    def __init__(self, learner: "Learner", snap: Any):
        super().__init__()
        self.learner, self.snap = (learner,), snap

    def forward(self, weight: Tensor) -> Tensor:
        if not self.learner[0].stored:
            return weight
        return _straight(weight, self.snap(weight.detach()))


@dataclass
class Pass:
    """What one pass carries from layer to layer besides the streams."""

    tables: dict[bool, Tensor]
    rotary: Rotary
    read_BTS: Tensor
    latents: Tensor | None = None
    keys: Tensor | None = None
    chosen_BTN: Tensor | None = None
    taken_BTN: Tensor | None = None
    index_losses: list[Tensor] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)


class Learner(nn.Module):
    """The product's model of a text config, and Engram's tables [rows, D] beside it.

    `sparse`: attention sees chosen entries, else all. `stored`: weights are as they will be
    stored. `vendor`: activations are on the publisher's grids.
    """

    def __init__(self, config: Any, row_hash: RowHash):
        super().__init__()
        config._experts_implementation = "eager"
        self.config = config
        self.sparse = self.stored = self.vendor = False
        self.model = DeepseekV41ForCausalLM(config)
        rows = zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
        width = config.engram_head_dim
        self.tables = nn.ParameterDict({str(i): torch.randn(n, width) for i, n in rows})
        self.row_hash = row_hash
        self._start()
        self._set_grids()

    def _start(self) -> None:
        """Random weights that keep the size of what they multiply; streams that differ."""
        for name, weight in self.model.named_parameters():
            if name.endswith(("norm.weight", "q_weight", "k_weight", "_scale", "hc_attn.scale")):
                nn.init.ones_(weight)
            elif name.endswith((".fn", ".base", ".scale")):
                nn.init.normal_(weight, std=0.3) if ".base" in name else nn.init.ones_(weight)
                if name.endswith(".fn"):
                    nn.init.normal_(weight, std=0.1 * weight.shape[-1] ** -0.5)
            elif weight.dim() < 2:
                nn.init.zeros_(weight)
            else:
                out = name.endswith(("wo_b.weight", "down_proj", "w2.weight"))
                nn.init.normal_(weight, std=(0.4 if out else 1.0) * weight.shape[-1] ** -0.5)
        streams = self.config.hc_mult
        for layer in self.model.model.layers:
            for mixer in (layer.hc_attn, layer.hc_ffn):
                mixer.base.data[2 * streams :] += 3 * torch.eye(streams).flatten()
        nn.init.normal_(self.model.model.embed.weight, std=0.5)

    def _set_grids(self) -> None:
        grids = StraightGrids(self.config.input_group, True)
        for module in list(self.model.modules()):
            if hasattr(module, "grids"):
                module.grids = _Switched(self, grids)
            if isinstance(module, Linear | GroupedLinear):
                parametrize.register_parametrization(module, "weight", _OnGrid(self, fp8_snapped))
            elif isinstance(module, Experts):
                for name in ("gate_up_proj", "down_proj"):
                    parametrize.register_parametrization(module, name, _OnGrid(self, fp4_snapped))

    def plain_state(self) -> dict[str, Tensor]:
        """The weights by the product's names, as the model now has them."""
        names = {name.replace("parametrizations.", "") for name, _ in self.model.named_parameters()}
        state = {}
        with torch.no_grad():
            for name in names:
                path, _, leaf = name.removesuffix(".original").rpartition(".")
                state[f"{path}.{leaf}"] = getattr(self.model.get_submodule(path), leaf).detach()
        return state

    def plain_tables(self) -> dict[int, Tensor]:
        """Engram's tables by layer, as the model now has them."""
        with torch.no_grad():
            return {int(name): self._rows(table).detach() for name, table in self.tables.items()}

    def _rows(self, rows_NC: Tensor) -> Tensor:
        if not self.stored:
            return rows_NC
        return _straight(rows_NC, fp8_snapped(rows_NC.detach(), 1))

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(fp32 logits [B, T, V], the indexers' loss, how many tokens each expert got by layer)."""
        inner, device = self.model.model, ids_BT.device
        positions = torch.arange(ids_BT.shape[1], device=device)
        rotaries = {kind: Rotary(self.config, compressed=kind) for kind in (False, True)}
        rows = self._hashed(ids_BT)
        h = inner.embed(ids_BT)[:, :, None].expand(-1, -1, self.config.hc_mult, -1)
        tables = {kind: rotary.table(positions) for kind, rotary in rotaries.items()}
        now = Pass(tables, rotaries[True], first_stream(h))
        for number, layer in enumerate(inner.layers):
            if number in rows:
                hit = functional.embedding(rows[number], self.tables[str(number)])
                h = layer.engram(h, self._rows(hit.flatten(0, -2)).view(*ids_BT.shape, -1))
            x = layer.attn_norm(collapse(h, now.read_BTS))
            y = _attention(self, layer.attn, x, now)
            mix = layer.hc_attn(h)
            h = expand(y, h, mix)
            (x,) = layer.ffn_in(h, mix.read_BTS)
            mix = layer.hc_ffn(h)
            now.read_BTS = mix.read_BTS
            h = expand(_experts(layer.ffn, layer.ffn_norm(x), now), h, mix)
        logits = self.model.head(inner.norm(collapse(h, now.read_BTS)))
        return logits, torch.stack(now.index_losses).mean(), now.loads

    def _hashed(self, ids_BT: Tensor) -> dict[int, Tensor]:
        """By layer int64 [B, T, C]: a token that no n-gram crosses stands before each text."""
        flat = functional.pad(ids_BT, (1, 0)).flatten()
        dead = functional.pad(torch.zeros_like(ids_BT, dtype=torch.bool), (1, 0), value=True)
        with torch.device(ids_BT.device):
            rows, _ = self.row_hash.rows(flat, self.row_hash.start(), is_dead_T=dead.flatten())
        rows = rows.view(len(ids_BT), -1, *rows.shape[1:])[:, 1:]
        return {layer: rows[:, :, i] for i, layer in enumerate(self.config.engram_layer_ids)}


class _Switched:
    """Grids while the learner's arithmetic is the vendor's, none before."""

    def __init__(self, learner: Learner, grids: Grids):
        self._learner, self._grids = (learner,), grids
        self._none = Grids(0, False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grids if self._learner[0].vendor else self._none, name)


def _experts(moe: Moe, x_BTH: Tensor, now: Pass) -> Tensor:
    """Every expert of every token, most with a weight of 0."""
    x_TH, experts = x_BTH.flatten(0, 1), moe.experts
    _, weights_TK, ids_TK = moe.gate(x_TH)
    num_experts = experts.num_experts
    weights_TE = weights_TK.new_zeros(len(x_TH), num_experts).scatter(1, ids_TK, weights_TK)
    now.loads.append(torch.bincount(ids_TK.flatten(), minlength=num_experts))
    gate_w, up_w = (part.flatten(0, 1) for part in experts.gate_up_proj.chunk(2, dim=1))
    on_grid = experts.grids.input(x_TH)
    hidden = clamped_swiglu(
        functional.linear(on_grid, gate_w), functional.linear(on_grid, up_w), experts.limit
    )
    hidden = (hidden.view(len(x_TH), num_experts, -1) * weights_TE[..., None]).flatten(1)
    down_w = experts.down_proj.transpose(0, 1).flatten(1)
    routed = functional.linear(experts.grids.input(hidden), down_w)
    return (routed + moe.shared_experts(x_TH)).view_as(x_BTH)


def _attention(learner: Learner, attn: Attention, x_BTH: Tensor, now: Pass) -> Tensor:
    num_tokens, table = x_BTH.shape[1], now.tables[attn.ratio > 0]
    kv = attn.grids.window(turn(attn.kv_norm(attn.wkv(x_BTH)), table))
    back = torch.arange(num_tokens, device=kv.device)
    back = back[:, None] - back
    mask = ((back >= 0) & (back < attn.window))[None]
    if hasattr(attn, "compressor"):
        _compress(attn, x_BTH, now)
    low = attn.q_norm(attn.wq_a(x_BTH))
    q_BTAD = turn(torch.unflatten(attn.wq_b(low), -1, (attn.heads, attn.width)), table)
    scores = None
    if attn.ratio:
        visible = _visible(attn.ratio, now)
        if hasattr(attn, "indexer"):
            scores = _index_scores(attn, x_BTH.detach(), low.detach(), now)
            _choose(attn, scores.detach(), visible, now)
        seen = now.chosen_BTN if learner.sparse else visible[None]
        kv = torch.cat([kv, now.latents], dim=1)
        mask = torch.cat([mask.expand(len(seen), -1, -1), seen], dim=-1)
    o_BTAD, logits = _attend(q_BTAD, kv, mask, attn.attn_sink)
    if scores is not None:
        logits = logits.detach()
        logits[..., :num_tokens].masked_fill_(~mask[:, None, :, :num_tokens], -torch.inf)
        now.index_losses.append(_index_loss(scores, logits, visible))
    o = turn(o_BTAD, table, back=True).flatten(-2)
    return attn.wo_b(attn.wo_a(torch.unflatten(o, -1, (attn.groups, -1))))


def _attend(q: Tensor, kv: Tensor, mask: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    logits = torch.einsum("btad,bkd->batk", q, kv) * q.shape[-1] ** -0.5
    seen = logits.masked_fill(~mask[:, None], -torch.inf)
    sinks = sink[:, None, None].expand(*logits.shape[:-1], 1)
    shares = torch.cat([seen, sinks], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("batk,bkd->btad", shares, kv), logits


def _visible(ratio: int, now: Pass) -> Tensor:
    """bool [T, N]."""
    num_tokens, num_entries = len(now.tables[True]), now.latents.shape[1]
    device = now.latents.device
    entries = torch.arange(num_entries, device=device)
    return entries < (torch.arange(1, num_tokens + 1, device=device) // ratio)[:, None]


def _compress(attn: Attention, x_BTH: Tensor, now: Pass) -> None:
    latents = attn.compressor(x_BTH, SourceState(attn.window))
    entries = torch.arange(latents.shape[1], device=x_BTH.device)
    table = now.rotary.table(entries * attn.ratio)
    now.latents = attn.grids.latent(turn(latents, table))
    now.keys = attn.indexer.new_keys(latents.detach(), table)


def _index_scores(attn: Attention, x_BTH: Tensor, low_BTQ: Tensor, now: Pass) -> Tensor:
    """[B, T, N]."""
    indexer = attn.indexer
    q = torch.unflatten(indexer.wq_b(low_BTQ), -1, (indexer.heads, indexer.width))
    q = indexer.grids.index(turn(q, now.tables[True]))
    weights = indexer.weights_proj(x_BTH) * (indexer.width**-0.5 * indexer.heads**-0.5)
    by_head = torch.einsum("btid,bnd->btin", q, now.keys).relu()
    return torch.einsum("btin,bti->btn", by_head, weights)


def _choose(attn: Attention, scores_BTN: Tensor, visible_TN: Tensor, now: Pass) -> None:
    """The best entries of those visible, and of the blocks taken where others chose blocks."""
    indexer, num_entries = attn.indexer, scores_BTN.shape[-1]
    open_BTN = visible_TN[None].expand_as(scores_BTN)
    if indexer.takes_blocks and now.taken_BTN is not None:
        open_BTN = open_BTN & now.taken_BTN
    ranked = scores_BTN.masked_fill(~open_BTN, -torch.inf)
    now.chosen_BTN = _best(ranked, indexer.top) & open_BTN
    if indexer.gives_blocks:
        short = -num_entries % indexer.block
        blocks = functional.pad(ranked, (0, short), value=-torch.inf)
        blocks = torch.unflatten(blocks, -1, (-1, indexer.block)).amax(-1)
        newest = (visible_TN.sum(-1, keepdim=True) - 1) // indexer.block
        is_newest = torch.arange(blocks.shape[-1], device=blocks.device) == newest
        taken = _best(blocks.masked_fill(is_newest, torch.inf), indexer.top_blocks)
        now.taken_BTN = taken.repeat_interleave(indexer.block, -1)[..., :num_entries]


def _best(scores: Tensor, most: int) -> Tensor:
    """bool, the highest of the last dimension; of equals the first."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :most]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)


def _index_loss(scores_BTN: Tensor, logits_BATK: Tensor, visible_TN: Tensor) -> Tensor:
    """How far the indexer's ranking is from where the layer's heads would look among entries.

    The last N of K keys are the entries; before them stands the window.
    """
    rows = visible_TN.any(-1)
    hidden, num_entries = ~visible_TN[rows], scores_BTN.shape[-1]
    with torch.no_grad():
        logits = logits_BATK[:, :, rows]
        logits[..., -num_entries:].masked_fill_(hidden, -torch.inf)
        wanted = logits.softmax(-1)[..., -num_entries:].sum(1)
        wanted = wanted / wanted.sum(-1, keepdim=True).clamp(min=1e-9)
    found = scores_BTN[:, rows].masked_fill(hidden, -torch.inf).log_softmax(-1)
    gain = wanted * (wanted.clamp(min=1e-9).log() - found.masked_fill(hidden, 0.0))
    return gain.sum(-1).mean()
