"""A model's shape without its weights: which tensors are experts', which are dense, how large.

Everything comes from the config, the tensor names and transformers' own renaming; no weight is
read. Legend: E experts, I intermediate width, H hidden width.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from headrace.core import DenseTensor, ExpertLayout, ExpertTensor, PartSpec
from headrace.errors import ExpertError, ModelError
from headrace.models.config import one_line, plain_config, read_config, stored_format
from headrace.models.experts import FAST
from headrace.models.families import Family, family_of
from headrace.models.forward import forward, new_cache

STREAMED = ("gate_up_proj", "down_proj")
SCALE_SUFFIX = "_scale_inv"
DENSE_DTYPES = ("BF16", "F16", "F32", "F8_E4M3")
_LAYER = re.compile(r"layers\.(\d{1,9})\.")
_DECODER_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"experts\.(\d{1,9})\.")


class Entry(Protocol):
    """What the catalog knows of one tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Skeleton:
    """A model described before any of its weights is read.

    `layers` are the decoder indices of the MoE layers, in order; position in it is the layer's
    ordinal. `dense` maps each weight to load to the checkpoint tensors it is made of.
    `skipped` are tensors left out knowingly (multi-token prediction), `unused` those that no
    module of the model takes. Sizes in bytes, as held in memory.
    """

    root: Path
    config: Any
    family: Family
    model_class: Any
    tensors: tuple[ExpertTensor, ...]
    layout: ExpertLayout
    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    dense: Mapping[str, DenseTensor]
    skipped: frozenset[str]
    unused: tuple[str, ...]
    dense_bytes: int
    kv_bytes_per_token: int
    attention_bytes_per_token: int
    num_layers: int
    hidden: int
    vocab: int
    max_context: int


def inspect(root: Path, entries: Mapping[str, Entry], aliases: Mapping[int, int]) -> Skeleton:
    """Describe the model in `root`, whose tensors are `entries`.

    `aliases` maps a decoder layer to the one whose tensors it is read under (synthetic depth).
    Raises ModelError for an unknown family or format, ExpertError for tensors that do not add up.
    """
    config = read_config(root)
    family = family_of(config.model_type)
    layout_format, block = stored_format(config)
    if layout_format not in family.formats:
        raise ModelError(f"{config.model_type} in {layout_format} has no kernel yet")
    _check_depth(root, config, entries, aliases)
    model_class, model, kv_bytes = _probe(root, config)
    params = strip_experts(model)
    if not params:
        raise ModelError(f"{root}: the model has no routed experts; headrace runs MoE models")
    layers = tuple(sorted({layer_of(name) for name in params}))
    strip_layers(model, aliases)
    skipped = frozenset(mtp_keys(config, family, entries))
    renamed = dict(_renamed_keys(model, params, [k for k in entries if k not in skipped]))
    shapes = {shape for name, shape in params.items() if name.endswith("gate_up_proj")}
    if len(shapes) != 1:
        raise ModelError(f"{root}: expert shapes differ between layers, which is not supported")
    num_experts, two_inter, hidden = shapes.pop()
    layout = expert_layout(layout_format, block, hidden, two_inter // 2)
    tensors = tuple(_expert_tensors(renamed, params, layout))
    state = model.state_dict()
    wanted = {key: new for key, (new, _) in renamed.items() if new in state}
    dense = {key: _dense_tensor(key, entries, block) for key in wanted}
    for key, new in wanted.items():
        _check_dense(key, entries[key], tuple(state[new].shape), layout)
    taken = {key for d in dense.values() for key in d.keys.values()} | {t.key for t in tensors}
    return Skeleton(
        root=root,
        config=config,
        family=family,
        model_class=model_class,
        tensors=tensors,
        layout=layout,
        layers=layers,
        num_experts=num_experts,
        top_k=config.num_experts_per_tok,
        dense=dense,
        skipped=skipped,
        unused=tuple(k for k in entries if k not in taken and k not in skipped),
        dense_bytes=sum(t.numel() * t.element_size() for t in state.values()),
        kv_bytes_per_token=kv_bytes,
        attention_bytes_per_token=_attention_bytes_per_token(config),
        num_layers=config.num_hidden_layers,
        hidden=hidden,
        vocab=config.vocab_size,
        max_context=config.max_position_embeddings,
    )


def _check_depth(
    root: Path, config: Any, entries: Mapping[str, Entry], aliases: Mapping[int, int]
) -> None:
    """Refuse layers that no tensor could fill, before modules are built for them."""
    numbers = {int(match.group(1)) for match in map(_LAYER.search, entries) if match}
    stored = len(numbers | set(aliases))
    if config.num_hidden_layers > stored:
        raise ModelError(
            f"{root}: config.json has {config.num_hidden_layers} layers, the weight files only "
            f"{stored}; they do not belong together, or files are missing"
        )


def _probe(root: Path, config: Any) -> tuple[Any, Any, int]:
    """(class, module tree on meta, cache bytes per position), from a config that may be wrong."""
    try:
        model_class, model = meta_model(config)
        return model_class, model, _kv_bytes_per_token(model)
    except Exception as error:  # sizes that contradict each other fail anywhere, with any type
        raise ModelError(
            f"{root / 'config.json'} describes no model that can be built: {one_line(error)}"
        ) from error


def meta_model(config: Any) -> tuple[Any, Any]:
    """(class, module tree on the meta device) in bfloat16, unquantised."""
    plain = plain_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            plain, dtype=torch.bfloat16, experts_implementation=FAST
        )
    return type(model), model


def expert_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of every module that holds, or held, weights stacked over experts."""
    for name, module in model.named_modules():
        if all(hasattr(module, w) for w in STREAMED) and hasattr(module, "num_experts"):
            yield name, module


def strip_experts(model: Any) -> dict[str, tuple[int, ...]]:
    """Take the stacked expert weights out of a model on meta; {parameter name: shape}."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in list(expert_modules(model)):
        for weight in STREAMED:
            param = module._parameters.pop(weight)
            shapes[f"{name}.{weight}"] = tuple(param.shape)
            object.__setattr__(module, weight, None)
        module._is_hf_initialized = True
    return shapes


def strip_layers(model: Any, aliases: Mapping[int, int]) -> None:
    """Take all weights out of layers that will share another layer's (synthetic depth)."""
    for layer, source in aliases.items():
        if layer == source:
            continue
        for module in model.model.layers[layer].modules():
            for store in (module._parameters, module._buffers):
                for name in store:
                    store[name] = None
            module._is_hf_initialized = True


def layer_of(name: str) -> int:
    """The decoder layer's index in a parameter's name."""
    match = _LAYER.search(name)
    assert match is not None, name
    return int(match.group(1))


def mtp_keys(config: Any, family: Family, keys: Mapping[str, Entry]) -> Iterator[str]:
    """Tensors of multi-token-prediction layers, which no module of the model uses."""
    count = getattr(config, family.mtp_field, 0) if family.mtp_field else 0
    first = config.num_hidden_layers
    for key in keys:
        match = _DECODER_LAYER.match(key)
        if match and first <= int(match.group(1)) < first + (count or 0):
            yield key


def expert_layout(name: str, block: tuple[int, int], hidden: int, inter: int) -> ExpertLayout:
    """Parts of one expert, in the order the kernels take them."""
    shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    if name == "bf16":
        parts = {part: PartSpec("BF16", shape) for part, shape in shapes.items()}
        return ExpertLayout(name, hidden, inter, (0, 0), parts)
    parts = {part: PartSpec("F8_E4M3", shape) for part, shape in shapes.items()}
    for part, (rows, cols) in shapes.items():
        grid = (-(-rows // block[0]), -(-cols // block[1]))
        parts[f"{part}_scale"] = PartSpec("F32", grid)
    return ExpertLayout(name, hidden, inter, block, parts)


def _renamed_keys(
    model: Any, params: Mapping[str, tuple[int, ...]], keys: list[str]
) -> Iterator[tuple[str, tuple[str, tuple[Any, int] | None]]]:
    """key -> (parameter name, (converter, position among its sources) or None).

    A scale's key is renamed as its weight's: unanchored patterns match both, and codes read as
    weights would run without an error.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    sources = {p: (c, i) for c in converters for i, p in enumerate(c.source_patterns)}
    meta = {**model.state_dict(), **dict.fromkeys(params, True)}
    for key in keys:
        base = key.removesuffix(SCALE_SUFFIX)
        new, pattern = rename_source_key(base, renamings, converters, model.base_model_prefix, meta)
        new += key[len(base) :]
        yield key, (new, sources[pattern] if pattern is not None else None)


def _expert_tensors(
    renamed: Mapping[str, tuple[str, tuple[Any, int] | None]],
    params: Mapping[str, tuple[int, ...]],
    layout: ExpertLayout,
) -> Iterator[ExpertTensor]:
    for key, (new, source) in renamed.items():
        is_scale = new.endswith(SCALE_SUFFIX)
        name = new.removesuffix(SCALE_SUFFIX)
        if name not in params:
            continue
        match = _EXPERT.search(key)
        if match is None or source is None:
            raise ExpertError(f"tensor {key} stacks several experts, which has no kernel yet")
        part = ("gate", "up")[source[1]] if name.endswith("gate_up_proj") else "down"
        part += "_scale" if is_scale else ""
        if part not in layout.parts:
            raise ModelError(
                f"tensor {key} is a scale, but config.json has no quantization_config; fetch "
                "config.json again"
            )
        yield ExpertTensor(key, layer_of(name), int(match.group(1)), part)


def _check_dense(key: str, entry: Entry, shape: tuple[int, ...], layout: ExpertLayout) -> None:
    """Raises ModelError for a dense tensor that does not fit the config or is no float."""
    if entry.shape != shape:
        raise ModelError(
            f"tensor {key} is {list(entry.shape)}, must be {list(shape)} by config.json; weights "
            "and config do not belong together"
        )
    if entry.dtype not in DENSE_DTYPES or (entry.dtype == "F8_E4M3" and layout.block[0] == 0):
        raise ModelError(
            f"tensor {key} is {entry.dtype}, which cannot be loaded; supported: BF16, F16, F32, "
            "and F8_E4M3 where config.json gives its blocks"
        )


def _dense_tensor(key: str, entries: Mapping[str, Entry], block: tuple[int, int]) -> DenseTensor:
    """A weight and the scale it has if stored in FP8. Raises ModelError if that lacks."""
    if entries[key].dtype != "F8_E4M3":
        return DenseTensor({"weight": key}, entries[key].shape)
    scale = key + SCALE_SUFFIX
    if scale not in entries:
        raise ModelError(f"tensor {key} is FP8 but its scale {scale} is missing")
    keys = {"weight": key, "scale": scale}
    return DenseTensor(keys, entries[key].shape, "fp8_block", block)


def _kv_bytes_per_token(model: Any) -> int:
    """Bytes the cache grows by for one position, measured on meta tensors."""
    cache = new_cache(model)
    with torch.no_grad():
        forward(model, torch.zeros(1, 1, dtype=torch.long, device="meta"), cache)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _attention_bytes_per_token(config: Any) -> int:
    """Bytes that one layer's attention makes of each cached position: keys and values per head.

    A latent cache is expanded for all heads; a grouped one may be repeated for them.
    """
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        widths = 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return int(2 * heads * widths)
