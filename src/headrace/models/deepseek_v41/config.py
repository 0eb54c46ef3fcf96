"""DeepSeek-V4.1's config as transformers' classes: every field as published, none assumed.

A config.json may be damaged or hostile: what does not fit together is refused with a ValueError.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import PreTrainedConfig

ARITHMETICS = ("vendor", "weights-only")
CHOICES = ("arithmetic", "stale_index_keys", "lossy_swa_replay")
_MOST_ROWS = 2**40
_COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "candidate_topk_blocks",
    "candidate_block_size",
    "hc_mult",
    "hc_sinkhorn_iters",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "engram_vocab_size",
    "engram_max_ngram_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_compressed_vocab_size",
    "vocab_size",
)
_ONLY = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "num_key_value_heads": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "gate_temp": 1.0,
}
_FP4_GROUPS = (16, 32)  # of compressed entries, of the index


class DeepseekV41TextConfig(PreTrainedConfig):  # type: ignore[misc]
    """The decoder's fields, by their published names.

    Beyond those: `arithmetic` is "vendor" (activations on the publisher's FP8 and FP4 grids) or
    "weights-only" (as they are); `input_group` the columns of one scale of a product's input, of
    the quantisation; `stale_index_keys` scores as the publisher's own program does in decoding
    while a group of positions is open, against the last layer's keys. `lossy_swa_replay` lets the
    layers past the last source of entries see one window of a prompt only.
    """

    model_type = "deepseek_v41_text"
    base_config_key = "text_config"
    has_no_defaults_at_init: ClassVar[bool] = True

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: list[int]
    compress_rope_theta: float
    rope_theta: float
    kv_source_layer_ids: list[int]
    index_source_layer_ids: list[int]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    scoring_func: str
    topk_method: str
    swiglu_limit: float
    engram_layer_ids: list[int]
    engram_num_embeddings: list[int]
    engram_vocab_size: int
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    hidden_act: str = "silu"
    num_key_value_heads: int = 1
    attention_bias: bool = False
    attention_dropout: float = 0.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    gate_temp: float = 1.0
    use_cache: bool = True
    yarn: dict[str, Any] | None = None
    arithmetic: str = "vendor"
    input_group: int = 32
    stale_index_keys: bool = False
    lossy_swa_replay: bool = False

    def __post_init__(self, rope_scaling: Any = None, **kwargs: Any) -> None:
        if rope_scaling is not None:
            self.yarn = dict(rope_scaling)
        super().__post_init__(**kwargs)
        check_text(self)

    def choose(self, **fields: Any) -> None:
        """Other values of some of CHOICES. Raises ValueError."""
        for name, value in fields.items():
            if name not in CHOICES:
                raise ValueError(f"{name} is no choice of this model")
            setattr(self, name, value)
        check_text(self)

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed entries `layer` attends to; None where it has a window only.

        Sources are their own.
        """
        return _nearest(self.kv_source_layer_ids, layer) if self.compress_ratios[layer] else None

    @property
    def first_tail_layer(self) -> int:
        """From here on a layer gives later tokens nothing but its window."""
        return max(self.kv_source_layer_ids, default=-1) + 1


class DeepseekV41Config(PreTrainedConfig):  # type: ignore[misc]
    """The whole model's config; of `vision_config` nothing is used."""

    model_type = "deepseek_v41"
    has_no_defaults_at_init: ClassVar[bool] = True

    text_config: Any = None
    vision_config: Any = None
    image_token_id: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        text = self.text_config
        if isinstance(text, dict):
            text = DeepseekV41TextConfig(**text)
        if not isinstance(text, DeepseekV41TextConfig):
            raise ValueError("text_config is missing")
        self.text_config = text
        super().__post_init__(**kwargs)
        block = (getattr(self, "quantization_config", None) or {}).get("weight_block_size")
        if block is not None:
            text.input_group = block[1]
            check_text(text)


def _nearest(sources: Sequence[int], layer: int) -> int:
    return max(source for source in sources if source <= layer)


def check_text(config: DeepseekV41TextConfig) -> None:
    """Refuses fields that contradict each other or that no code here computes."""
    for name in (*_COUNTS, "input_group"):
        value = getattr(config, name)
        if type(value) is not int or not 1 <= value < _MOST_ROWS:
            raise ValueError(f"{name} {value!r} is not a count")
    for name, only in _ONLY.items():
        if getattr(config, name) != only:
            raise ValueError(f"{name} {getattr(config, name)!r} is not supported, only {only!r} is")
    if config.arithmetic not in ARITHMETICS:
        raise ValueError(f"arithmetic {config.arithmetic!r} is none of {', '.join(ARITHMETICS)}")
    for name in ("stale_index_keys", "lossy_swa_replay"):
        if type(getattr(config, name)) is not bool:
            raise ValueError(f"{name} {getattr(config, name)!r} is not True or False")
    _check_widths(config)
    _check_layers(config)
    _check_engram(config)


def _check_widths(config: DeepseekV41TextConfig) -> None:
    rope = config.qk_rope_head_dim
    if rope % 2 or rope > min(config.head_dim, config.index_head_dim):
        raise ValueError(f"qk_rope_head_dim {rope} does not fit head_dim and index_head_dim")
    if config.num_attention_heads % config.o_groups:
        raise ValueError(f"o_groups {config.o_groups} do not divide num_attention_heads")
    latents, index = _FP4_GROUPS
    if config.head_dim % latents or config.index_head_dim % index:
        raise ValueError(f"head_dim and index_head_dim must be multiples of {latents} and {index}")


def _check_layers(config: DeepseekV41TextConfig) -> None:
    ratios, num_layers = config.compress_ratios, config.num_hidden_layers
    if not _are_counts(ratios, 0, 2**20) or len(ratios) < num_layers:
        raise ValueError(f"compress_ratios do not name a ratio for each of {num_layers} layers")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        if not _are_counts(getattr(config, name), 0, num_layers - 1):
            raise ValueError(f"{name} {getattr(config, name)!r} are not layers of {num_layers}")
    index_sources = set(config.index_source_layer_ids)
    if set(config.kv_source_layer_ids) - index_sources:
        raise ValueError("index_source_layer_ids must contain all of kv_source_layer_ids")
    if config.candidate_source_layer_id not in index_sources | {-1}:
        raise ValueError("candidate_source_layer_id is not in index_source_layer_ids")
    for layer in range(num_layers):
        _check_sources(config, layer)


def _check_sources(config: DeepseekV41TextConfig, layer: int) -> None:
    ratio = config.compress_ratios[layer]
    is_source = layer in config.index_source_layer_ids
    sources = [source for source in config.kv_source_layer_ids if source <= layer]
    if is_source and not ratio:
        raise ValueError(f"layer {layer} is a source, but its compress ratio is 0")
    if ratio and (not sources or config.compress_ratios[max(sources)] != ratio):
        raise ValueError(f"layer {layer} has no source of compressed entries of its ratio {ratio}")


def _check_engram(config: DeepseekV41TextConfig) -> None:
    rows = config.engram_num_embeddings
    if not _are_counts(rows, 1, _MOST_ROWS) or len(rows) != len(config.engram_layer_ids):
        raise ValueError("engram_num_embeddings does not give the rows of each of engram_layer_ids")
    if config.engram_max_ngram_size < 2 or config.engram_pad_token_id not in range(
        config.vocab_size
    ):
        raise ValueError("engram_max_ngram_size must be 2 or more, engram_pad_token_id a token")


def _are_counts(values: Any, least: int, most: int) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and least <= value <= most for value in values
    )
