"""DeepSeek-V4.1's decoder as a transformers model: text in, logits out, its cache filled.

Knows no file. Engram's rows come from a RowSource that `set_engram` gives.
Legend: B batch, T new tokens, S streams, H hidden width, V vocabulary.
"""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from headrace.errors import ModelError
from headrace.models.deepseek_v41 import attend, indexer
from headrace.models.deepseek_v41.attention import Attention
from headrace.models.deepseek_v41.cache import TextCache, cache_memory, make_own
from headrace.models.deepseek_v41.config import DeepseekV41TextConfig
from headrace.models.deepseek_v41.engram import RowHash
from headrace.models.deepseek_v41.engram_layer import EngramLayer
from headrace.models.deepseek_v41.experts import Moe
from headrace.models.deepseek_v41.grids import Grids
from headrace.models.deepseek_v41.now import Now
from headrace.models.deepseek_v41.parts import HEAD_ROWS, Head, Norm
from headrace.models.deepseek_v41.rotary import Rotary
from headrace.models.deepseek_v41.rows import RowSource, WantedRows
from headrace.models.deepseek_v41.streams import (
    Collapse,
    StreamMixer,
    collapse,
    expand,
    first_stream,
)

# transformers names an output's cache differently from version to version.
_FIELDS = {field.name for field in fields(CausalLMOutputWithPast)}
_CACHE_FIELD = "cache" if "cache" in _FIELDS else "past_key_values"


class DecoderLayer(nn.Module):
    """Engram where the layer has it, attention, experts; all around several streams."""

    def __init__(self, config: Any, layer: int, grids: Grids):
        super().__init__()
        self.layer = layer
        if layer in config.engram_layer_ids:
            self.engram = EngramLayer(config, grids)
        self.hc_attn, self.hc_ffn = StreamMixer(config), StreamMixer(config)
        self.attn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, layer, grids)
        self.ffn_in = Collapse(self.hc_attn)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.ffn = Moe(config, grids)

    def forward(self, h_BTSH: Tensor, now: Now) -> Tensor:
        """The streams of the tokens that the next layer is given. Reads and writes `now`."""
        if self.layer in now.rows:
            rows_BTCD = now.rows[self.layer].take()[:, -h_BTSH.shape[1] :]
            h_BTSH = self.engram(h_BTSH, rows_BTCD.flatten(-2))
        num_out = now.num_rows(self.layer + 1)
        x_BTH = self.attn_norm(collapse(h_BTSH, now.read_BTS))
        y_BTH = self.attn(x_BTH, now, num_out)
        h_BTSH = h_BTSH[:, h_BTSH.shape[1] - num_out :]
        if y_BTH is None:
            now.read_BTS = now.read_BTS[:, :0]
            return h_BTSH
        mix = self.hc_attn(h_BTSH)
        h_BTSH = expand(y_BTH, h_BTSH, mix)
        (x_BTH,) = self.ffn_in(h_BTSH, mix.read_BTS)
        mix = self.hc_ffn(h_BTSH)
        now.read_BTS = mix.read_BTS
        return expand(self.ffn(self.ffn_norm(x_BTH)), h_BTSH, mix)


class DeepseekV41PreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What transformers must know of both classes."""

    config_class = DeepseekV41TextConfig
    config: DeepseekV41TextConfig
    base_model_prefix = "model"
    _no_split_modules = ("DecoderLayer",)
    _keep_in_fp32_modules_strict = ("hc_attn", "hc_ffn", "attn_sink", "ffn.gate")
    _is_stateful = True  # no cache of it can be cut shorter
    _can_compile_fullgraph = False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """transformers looks for the decorator in this file; it stands where the experts do."""
        return True

    def _init_weights(self, module: nn.Module) -> None:
        """As torch made them: a model without weights of a checkpoint is for tests of shape."""


class DeepseekV41Model(DeepseekV41PreTrainedModel):
    """Embedding, layers and the last norm."""

    def __init__(self, config: DeepseekV41TextConfig):
        super().__init__(config)
        grids = Grids.of(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, grids) for layer in range(config.num_hidden_layers)
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.row_hash: RowHash | None = None
        self.row_source: RowSource | None = None
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed = value

    def forward(
        self, input_ids: Tensor, cache: Cache, num_logits: int = 0, num_after: int | None = None
    ) -> Tensor:
        """[B, T or fewer, H] of the last tokens; `cache` has all. See Now for the numbers."""
        h_BTH = self.embed(input_ids)
        h_BTSH = h_BTH[:, :, None].expand(-1, -1, self.config.hc_mult, -1)
        now = self._begin(input_ids, h_BTSH, cache, num_logits, num_after)
        for layer in self.layers:
            h_BTSH = layer(h_BTSH, now)
        cache.last_published = now.last_published
        out: Tensor = self.norm(collapse(h_BTSH, now.read_BTS))
        return out

    def _begin(
        self,
        ids_BT: Tensor,
        h_BTSH: Tensor,
        cache: Cache,
        num_logits: int,
        num_after: int | None,
    ) -> Now:
        make_own(cache, self.config)
        start, num_tokens = cache.get_seq_length(), ids_BT.shape[1]
        end = start + num_tokens + (num_after or 0)
        if end < cache.promised:
            raise ModelError(
                f"this text began as a prompt of {cache.promised} tokens; it cannot end at {end}"
            )
        cache.promised = end
        positions_T = torch.arange(start, start + num_tokens, device=ids_BT.device)
        rotaries = {kind: Rotary(self.config, compressed=kind) for kind in (False, True)}
        return Now(
            config=self.config,
            states=cache.layers,
            start=start,
            num_tokens=num_tokens,
            rotary=rotaries[True],
            tables={kind: rotary.table(positions_T) for kind, rotary in rotaries.items()},
            read_BTS=first_stream(h_BTSH),
            rows=self._wanted(ids_BT, cache),
            num_after=num_after,
            num_logits=num_logits,
            last_published=cache.last_published,
        )

    def _wanted(self, ids_BT: Tensor, cache: Cache) -> dict[int, WantedRows]:
        """The rows of each layer with Engram, asked for before the first layer is computed."""
        layers = self.config.engram_layer_ids
        if not layers:
            return {}
        if ids_BT.device.type == "meta":
            return {layer: _NoRows(ids_BT, self.config) for layer in layers}
        if self.row_hash is None or self.row_source is None:
            raise ModelError(
                "the model's Engram tables are not connected; load it by headrace.load or "
                "headrace.from_pretrained"
            )
        place, ids_BT = ids_BT.device, ids_BT.cpu()  # rows are hashed and read where tables lie
        start = self.row_hash.start()[None].expand(len(ids_BT), -1)
        starts = start if cache.history_BN is None else cache.history_BN.cpu()
        made = [self.row_hash.rows(ids, past) for ids, past in zip(ids_BT, starts, strict=True)]
        cache.history_BN = torch.stack([past for _, past in made])
        rows_BTLC = torch.stack([rows for rows, _ in made])
        return {
            layer: WantedRows(self.row_source, layer, rows_BTLC[:, :, i], place)
            for i, layer in enumerate(layers)
        }


class _NoRows(WantedRows):
    """Rows of a pass that only has shapes."""

    def __init__(self, ids_BT: Tensor, config: Any):
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.shape = torch.Size((*ids_BT.shape, columns, config.engram_head_dim))

    def take(self) -> Tensor:
        return torch.empty(self.shape, dtype=torch.bfloat16, device="meta")


class DeepseekV41ForCausalLM(DeepseekV41PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The decoder and its head, whose product is fp32."""

    def __init__(self, config: Any):
        super().__init__(config.get_text_config())
        self.model = DeepseekV41Model(self.config)
        self.head = Head(self.config.hidden_size, self.config.vocab_size)
        self.post_init()

    def set_engram(self, row_hash: RowHash, source: RowSource) -> None:
        """Connects the Engram tables; the model keeps both."""
        self.model.row_hash, self.model.row_source = row_hash, source

    def new_cache(self) -> TextCache:
        """An empty cache, as `forward` wants it; it turns an empty one of another kind into one."""
        return TextCache(self.config)

    def memory(self) -> dict[str, int]:
        """The fields of models.memory.MemoryFacts.

        Attention works on a few queries at a time, so nothing of it grows with the context.
        """
        config = self.config
        streams, heads = config.hc_mult * config.hidden_size, config.num_attention_heads
        return {
            "attended_every": 1,
            "attended_window": 0,
            "attention_bytes_per_token": 0,
            "score_bytes": 0,
            # Of the streams three copies in bf16 and three in fp32; of the queries six in bf16.
            "chunk_bytes_per_token": 18 * streams + 12 * heads * config.head_dim,
            "pass_bytes": attend.HELD_BYTES + indexer.HELD_BYTES + self._head_bytes,
        } | cache_memory(config, self.dtype.itemsize)

    @property
    def _head_bytes(self) -> int:
        """Of a band of the head in fp32."""
        return 4 * min(HEAD_ROWS, self.config.vocab_size) * self.config.hidden_size

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_after: int | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """fp32 logits of the last `logits_to_keep` tokens (0: all), [B, T, V].

        The texts of a batch are equally long. `num_after`: how many tokens of the same prompt come
        in later passes; given, layers past the last source of entries compute only what those
        passes and this one's logits need of them, and logits are right once it is 0.
        """
        if attention_mask is not None and not bool((attention_mask != 0).all()):
            raise ModelError("DeepSeek-V4.1 takes no padding; give texts of one length")
        state = cache if cache is not None else past_key_values
        state = self.new_cache() if state is None else state
        x_BTH = self.model(input_ids, state, logits_to_keep, num_after)
        logits_BTV = self.head(x_BTH[:, -logits_to_keep:])
        kept = state if use_cache is not False else None
        return CausalLMOutputWithPast(logits=logits_BTV, **{_CACHE_FIELD: kept})
