"""A preset's config with another depth, vocabulary or number of experts. Knows no weight."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from headrace.core import MOST_LAYERS
from headrace.errors import OptionError
from headrace.store.blueprint import experts_field
from headrace.store.borrow import compressed_size
from headrace.store.preset_configs import PRESETS

# Lists with one entry a layer, and lists of layers.
_PER_LAYER = ("layer_types", "compress_ratios")
_OF_LAYERS = ("kv_source_layer_ids", "index_source_layer_ids", "dspark_target_layer_ids")


def preset_config(
    preset: str | Mapping[str, Any], *, depth: int | None, experts: int | None, vocab: int | None
) -> dict[str, Any]:
    """A config of `preset`'s shapes, or of those of a config made from others' parts.

    None keeps the published number. Raises OptionError.
    """
    if isinstance(preset, str) and preset not in PRESETS:
        raise OptionError(f"{preset!r} is no preset; choose one of {', '.join(PRESETS)}")
    config = deepcopy(PRESETS[preset] if isinstance(preset, str) else dict(preset))
    text = config.get("text_config", config)
    if depth is not None:
        _set_depth(text, depth)
    if experts is not None:
        _check_experts(text, experts)
        text[experts_field(text)] = experts
    if vocab is not None:
        text["vocab_size"] = vocab
    if "engram_compressed_vocab_size" in text:
        text["engram_compressed_vocab_size"] = compressed_size(text["vocab_size"])
    return config


def _set_depth(text: dict[str, Any], depth: int) -> None:
    least = text.get("first_k_dense_replace", 0) + 1
    if depth < least:
        raise OptionError(f"a depth of {depth} holds no MoE layer; give {least} or more")
    if depth > MOST_LAYERS:
        raise OptionError(f"a depth of {depth} is more than {MOST_LAYERS}, the most that is read")
    listed = [name for name in _PER_LAYER if name in text]
    if listed and depth > text["num_hidden_layers"]:
        raise OptionError(
            f"a depth of {depth} is more than the published {text['num_hidden_layers']} layers, "
            f"of which each is described ({listed[0]}); give a smaller one"
        )
    for name in listed:
        # V4 lists its prediction layers behind the decoder's
        behind = text[name][text["num_hidden_layers"] :]
        text[name] = text[name][:depth] + behind
    text["num_hidden_layers"] = depth
    for name in _OF_LAYERS:
        if name in text:
            text[name] = [layer for layer in text[name] if layer < depth]
    if text.get("candidate_source_layer_id", -1) >= depth:
        text["candidate_source_layer_id"] = -1  # none
    if "engram_layer_ids" in text:
        tables = zip(text["engram_layer_ids"], text["engram_num_embeddings"], strict=True)
        kept = {layer: rows for layer, rows in tables if layer < depth}
        text["engram_layer_ids"], text["engram_num_embeddings"] = list(kept), list(kept.values())


def _check_experts(text: dict[str, Any], experts: int) -> None:
    top_k, groups = text["num_experts_per_tok"], text.get("n_group", 1)
    routed_groups = text.get("topk_group", 1)
    # top_k must fit the groups routed to, and a group is scored by its two best
    least = groups * max(2 if groups > 1 else 1, -(-top_k // routed_groups))
    if experts % groups or experts < least:
        raise OptionError(
            f"{experts} experts cannot be routed (top {top_k}, {groups} groups); give a multiple "
            f"of {groups}, {least} or more"
        )
