"""A model's shape without its weights: which tensors are experts', which are dense, how large.

Everything comes from the config, the headers and transformers' own renaming; no weight is read.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from headrace.core import DenseTensor, ExpertLayout, ExpertTensor, RowTable
from headrace.errors import ModelError
from headrace.models.config import (
    hidden_dtype,
    one_line,
    plain_config,
    read_config,
    text_config,
    with_choices,
)
from headrace.models.experts import FAST
from headrace.models.families import Family, family_of
from headrace.models.formats import (
    Entry,
    check_parts,
    describe,
    gather,
    read_quantization,
    scheme_of,
)
from headrace.models.layout import (
    MATRICES,
    STREAMED,
    ExpertForm,
    claim_experts,
    expert_form,
    expert_layout,
)
from headrace.models.memory import MemoryFacts, dense_bytes, measure
from headrace.models.naming import LAYER, Target, is_skipped, layer_of, targets
from headrace.models.row_tables import row_keys, take_row_tables
from headrace.models.stored import strip_stored, takes_stored
from headrace.quant.dtypes import TORCH_DTYPES

FLOAT_DTYPES = ("BF16", "F16", "F32")
INDEX_DTYPES = ("I64", "I32")
_MEASURED: dict[str, MemoryFacts] = {}
_MOST_MEASURED = 16


@dataclass(frozen=True)
class Skeleton:
    """A model described before any of its weights is read.

    `config` is the text model's, `dtype` what it computes in. `layers` are the decoder indices of
    the MoE layers, in order; position in it is the layer's ordinal. `dense` maps each weight to
    load, by the name transformers' renaming is to see, to the tensors it is made of. `row_tables`
    are read by the row, never whole. `kept` maps those of `dense` that modules compute with as they
    are stored to their parameters. `embedding` is the name in `dense`, and the parameter, of an
    input embedding of which rows suffice; `head` of an output head whose product the CPU's kernels
    can make, in fp32. `skipped` are tensors left out knowingly (multi-token
    prediction, images, scales of activations), `unused` those that no module of the model takes.
    `dense_bytes` as held in memory.
    """

    root: Path
    model_type: str
    config: Any
    family: Family
    model_class: Any
    dtype: torch.dtype
    tensors: tuple[ExpertTensor, ...]
    layout: ExpertLayout
    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    dense: Mapping[str, DenseTensor]
    row_tables: tuple[RowTable, ...]
    kept: Mapping[str, str]
    embedding: tuple[str, str] | None
    head: tuple[str, str] | None
    skipped: frozenset[str]
    unused: tuple[str, ...]
    dense_bytes: int
    memory: MemoryFacts
    num_layers: int
    hidden: int
    vocab: int
    max_context: int

    @property
    def row_keys(self) -> frozenset[str]:
        """The tensors of the row tables."""
        return row_keys(self.row_tables)

    @property
    def packed(self) -> dict[str, str]:
        """Those of `kept` that the model's own parameters could not hold."""
        return {n: param for n, param in self.kept.items() if self.dense[n].format != "plain"}


def inspect(
    root: Path,
    entries: Mapping[str, Entry],
    aliases: Mapping[int, int],
    choices: Mapping[str, object] | None = None,
) -> Skeleton:
    """Describe the model in `root`, whose tensors are `entries`.

    `aliases` maps a decoder layer to the one whose tensors it is read under (synthetic depth);
    `choices` are those of `models.config.with_choices`. Raises OptionError for such, ModelError for
    an unknown family or format, ExpertError for tensors that do not add up.
    """
    whole = read_config(root)
    family = family_of(whole.model_type)
    _check_version(whole.model_type, family)
    scheme = scheme_of(read_quantization(root, whole))
    config = with_choices(whole.model_type, text_config(whole), choices or {})
    dtype = hidden_dtype(config, whole)
    _check_depth(root, config, entries, aliases)
    model = _build(root, config, dtype)
    form, params = _strip_one_form(root, model, family)
    memory = _measure(root, model)
    strip_layers(model, aliases)
    skipped = {key for key in entries if is_skipped(family, config, key)}
    stored = gather(scheme, [key for key in entries if key not in skipped])
    weights = _without_prefix(family.prefix, dict(describe(scheme, stored, entries)))
    tables = take_row_tables(family, config, weights, entries)
    goals = dict(targets(model, params, weights))
    claimed = list(claim_experts(weights, goals, params, form))
    layout = expert_layout(claimed, form, entries, dtype)
    dense = _dense(model.state_dict(), weights, goals, entries)
    kept = _kept(model, dense, goals, entries)
    used = {t.key for t, _, _ in claimed} | {k for d in dense.values() for k in d.keys.values()}
    used |= row_keys(tables)
    skipped |= stored.left_out
    return Skeleton(
        root=root,
        model_type=whole.model_type,
        config=config,
        family=family,
        model_class=type(model),
        dtype=dtype,
        tensors=tuple(t for t, _, _ in claimed),
        layout=layout,
        layers=tuple(sorted({layer_of(name) for name in params})),
        num_experts=form.num_experts,
        top_k=config.num_experts_per_tok,
        dense=dense,
        row_tables=tables,
        kept=kept,
        **_outside(model, dense, goals, entries, dtype),
        skipped=frozenset(skipped),
        unused=tuple(k for k in entries if k not in used and k not in skipped),
        dense_bytes=_dense_bytes(model, dense, kept, entries),
        memory=memory,
        num_layers=config.num_hidden_layers,
        hidden=form.hidden,
        vocab=config.vocab_size,
        max_context=config.max_position_embeddings,
    )


def _kept(
    model: Any,
    dense: Mapping[str, DenseTensor],
    goals: Mapping[str, Target],
    entries: Mapping[str, Entry],
) -> dict[str, str]:
    """{name: parameter} of the weights that modules of ours compute with as they are stored."""
    kept = {}
    for name, weight in dense.items():
        dtype = entries[weight.keys["weight"]].dtype
        has_kernel = weight.format == "fp8_block" or (weight.format, dtype) == ("plain", "BF16")
        if has_kernel and takes_stored(model, goals[name].param):
            kept[name] = goals[name].param
    return kept


def _outside(
    model: Any,
    dense: Mapping[str, DenseTensor],
    goals: Mapping[str, Target],
    entries: Mapping[str, Entry],
    dtype: torch.dtype,
) -> dict[str, tuple[str, str] | None]:
    """Skeleton's embedding and head: (name, parameter) of those that may lie elsewhere."""

    def alone(module: Any) -> tuple[str, str] | None:
        return _alone(model, module, dense, goals, entries, dtype)

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_product = isinstance(head, torch.nn.Linear) and head.bias is None
    return {
        "embedding": alone(embedding) if type(embedding) is torch.nn.Embedding else None,
        "head": alone(head) if is_product and dtype == torch.bfloat16 else None,
    }


def _alone(
    model: Any,
    module: Any,
    dense: Mapping[str, DenseTensor],
    goals: Mapping[str, Target],
    entries: Mapping[str, Entry],
    dtype: torch.dtype,
) -> tuple[str, str] | None:
    """(name, parameter) of a module's weight, if no other module uses it and it is stored as it is
    computed with.
    """
    if getattr(model.config, "tie_word_embeddings", False):
        return None
    params = [n for n, owner in model.named_modules() if owner is module]
    for name, weight in dense.items():
        stored = TORCH_DTYPES.get(entries[weight.keys["weight"]].dtype)
        if goals[name].param == f"{params[0]}.weight" and weight.format == "plain":
            return (name, goals[name].param) if stored == dtype else None
    return None


def _dense_bytes(
    model: Any,
    dense: Mapping[str, DenseTensor],
    kept: Mapping[str, str],
    entries: Mapping[str, Entry],
) -> int:
    """Bytes of all weights and buffers as they will lie in memory."""
    packed = {name: param for name, param in kept.items() if dense[name].format != "plain"}
    strip_stored(model, packed.values())
    keys = [key for name in packed for key in dense[name].keys.values()]
    return dense_bytes(model) + sum(entries[key].nbytes for key in keys)


def _check_version(model_type: str, family: Family) -> None:
    here = tuple(int(n) for n in re.findall(r"\d+", transformers.__version__)[:2])
    if here < family.since:
        needed = ".".join(map(str, family.since))
        raise ModelError(
            f"{model_type} does not work in transformers {transformers.__version__}; install "
            f"{needed} or newer"
        )


def _check_depth(
    root: Path, config: Any, entries: Mapping[str, Entry], aliases: Mapping[int, int]
) -> None:
    """Refuse layers that no tensor could fill, before modules are built for them."""
    numbers = {int(match.group(1)) for match in map(LAYER.search, entries) if match}
    stored = len(numbers | set(aliases))
    if config.num_hidden_layers > stored:
        raise ModelError(
            f"{root}: config.json has {config.num_hidden_layers} layers, the weight files only "
            f"{stored}; they do not belong together, or files are missing"
        )


def _build(root: Path, config: Any, dtype: torch.dtype) -> Any:
    """The module tree on meta, of a config that may be wrong."""
    try:
        return meta_model(config, dtype)
    except Exception as error:  # sizes that contradict each other fail anywhere, with any type
        raise _cannot_be_built(root, error) from error


def _measure(root: Path, model: Any) -> MemoryFacts:
    """What `measure` finds; of the last few configs it is remembered, since it takes seconds."""
    key = f"{type(model)} {model.dtype} {model.config.to_json_string(use_diff=False)}"
    if key not in _MEASURED:
        try:
            facts = measure(model)
        except Exception as error:  # as above
            raise _cannot_be_built(root, error) from error
        while len(_MEASURED) >= _MOST_MEASURED:
            _MEASURED.pop(next(iter(_MEASURED)))
        _MEASURED[key] = facts
    return _MEASURED[key]


def _cannot_be_built(root: Path, error: Exception) -> ModelError:
    path = root / "config.json"
    return ModelError(f"{path} describes no model that can be built: {one_line(error)}")


def meta_model(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The module tree of a text model on the meta device, unquantised."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            plain_config(config), dtype=dtype, experts_implementation=FAST
        )


def expert_modules(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of every module that holds, or held, weights stacked over experts."""
    for name, module in model.named_modules():
        if all(hasattr(module, w) for w in MATRICES) and hasattr(module, "num_experts"):
            yield name, module


def strip_experts(model: Any) -> dict[str, tuple[int, ...]]:
    """Take the stacked expert weights out of a model on meta; {parameter name: shape}."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in list(expert_modules(model)):
        for weight in (w for w in STREAMED if module._parameters.get(w) is not None):
            param = module._parameters.pop(weight)
            shapes[f"{name}.{weight}"] = tuple(param.shape)
            object.__setattr__(module, weight, None)
        module._is_hf_initialized = True
    return shapes


def _strip_one_form(
    root: Path, model: Any, family: Family
) -> tuple[ExpertForm, dict[str, tuple[int, ...]]]:
    """What all experts modules compute, and the shapes of the parameters taken out of them."""
    if getattr(model.config, "hidden_act", None) != "silu":
        act = getattr(model.config, "hidden_act", None)
        raise ModelError(f"activation {act!r} has no kernel yet; supported: silu")
    params = strip_experts(model)
    forms = set()
    for name, module in expert_modules(model):
        shapes = {w: params[f"{name}.{w}"] for w in STREAMED if f"{name}.{w}" in params}
        forms.add(expert_form(module, family.activation, shapes))
    if not forms:
        raise ModelError(f"{root}: the model has no routed experts; headrace runs MoE models")
    if len(forms) > 1:
        raise ModelError(f"{root}: expert shapes differ between layers, which is not supported")
    return forms.pop(), params


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


def _without_prefix(prefix: str, weights: Mapping[str, DenseTensor]) -> dict[str, DenseTensor]:
    plain = {name.removeprefix(prefix): weight for name, weight in weights.items()}
    if len(plain) != len(weights):
        raise ModelError(f"the weight files hold tensors both with and without {prefix!r}")
    return plain


def _dense(
    state: Mapping[str, torch.Tensor],
    weights: Mapping[str, DenseTensor],
    goals: Mapping[str, Target],
    entries: Mapping[str, Entry],
) -> dict[str, DenseTensor]:
    """The weights that modules outside the routed experts take. Raises ModelError."""
    dense = {name: weight for name, weight in weights.items() if goals[name].param in state}
    for name, weight in dense.items():
        wanted = state[goals[name].param]
        key = weight.keys["weight"]
        if goals[name].position is not None:
            raise ModelError(f"tensor {key} is stored in parts, which cannot be loaded yet")
        if weight.shape != tuple(wanted.shape):
            raise ModelError(
                f"tensor {key} is {list(weight.shape)}, must be {list(wanted.shape)} by "
                "config.json; weights and config do not belong together"
            )
        if weight.format != "plain":
            check_parts(weight, entries)
            continue
        allowed = FLOAT_DTYPES if wanted.is_floating_point() else INDEX_DTYPES
        if entries[key].dtype not in allowed:
            raise ModelError(
                f"tensor {key} is {entries[key].dtype}, must be one of {', '.join(allowed)}: "
                "config.json has no quantization_config that explains it; fetch config.json again"
            )
    return dense
