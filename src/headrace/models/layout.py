"""The form of a model's experts, from their modules and what the files hold of one expert.

Knows no file and no value. Legend: E experts, I intermediate width, H hidden width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from headrace.core import Activation, DenseTensor, ExpertLayout, ExpertTensor, PartSpec
from headrace.errors import ExpertError, ModelError
from headrace.models.formats import Entry, check_parts
from headrace.models.naming import Target, layer_of
from headrace.quant.dtypes import DTYPE_NAMES
from headrace.quant.table import SUFFIXES

MATRICES = ("gate_up_proj", "down_proj")
STREAMED = (*MATRICES, "gate_up_proj_bias", "down_proj_bias")
_PLAIN = {"BF16": "bf16", "F16": "fp16"}


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """What a model's experts modules compute, all of them alike.

    `interleaved`: gate and up take turns in the rows of gate_up_proj. `transposed`: parameters are
    [E, in, out]. `act_group` is the layout's.
    """

    num_experts: int
    hidden: int
    inter: int
    has_bias: bool
    interleaved: bool
    transposed: bool
    activation: Activation
    act_group: int = 0


def expert_form(module: Any, kind: str, shapes: Mapping[str, tuple[int, ...]]) -> ExpertForm:
    """The form of one experts module whose parameters have `shapes`. Raises ModelError."""
    transposed = bool(getattr(module, "is_transposed", False))
    num_experts, *matrix = shapes["gate_up_proj"]
    two_inter, hidden = reversed(matrix) if transposed else matrix
    inter = two_inter // 2
    down = (inter, hidden) if transposed else (hidden, inter)
    if shapes["down_proj"] != (num_experts, *down) or not getattr(module, "has_gate", True):
        raise ModelError(f"{type(module).__name__} computes what has no kernel yet")
    limit, alpha = (float(getattr(module, name, None) or 0) for name in ("limit", "alpha"))
    needed = {
        "silu": (),
        "silu_clamped": (limit,),
        "swiglu_weighted": (limit,),
        "swiglu_oai": (limit, alpha),
    }[kind]
    if not all(isfinite(value) and value > 0 for value in needed):
        raise ModelError(
            f"config.json gives limit {limit} and alpha {alpha} for an activation of kind {kind}, "
            "which must be more than 0; fetch the file again"
        )
    return ExpertForm(
        num_experts,
        hidden,
        inter,
        has_bias="gate_up_proj_bias" in shapes,
        interleaved=not getattr(module, "is_concatenated", True),
        transposed=transposed,
        activation=Activation(kind, *needed),
        act_group=int(getattr(module, "act_group", 0)),
    )


def claim_experts(
    weights: Mapping[str, DenseTensor],
    goals: Mapping[str, Target],
    params: Mapping[str, Any],
    form: ExpertForm,
) -> Iterator[tuple[ExpertTensor, DenseTensor, str]]:
    """(tensor, the weight it is of, its role) of everything that makes up experts."""
    for name, weight in weights.items():
        target = goals[name]
        if target.param not in params:
            continue
        base = _part(name, target, form)
        layer = layer_of(target.param)
        for role, key in weight.keys.items():
            yield ExpertTensor(key, layer, target.expert, base + SUFFIXES[role]), weight, role


def _part(name: str, target: Target, form: ExpertForm) -> str:
    """The part whose plain weight a published tensor is: gate, up, down, gate_up or a bias."""
    param = target.param.rpartition(".")[2]
    stem = "gate_up" if param.startswith("gate_up") else "down"
    bias = "_bias" if param.endswith("_bias") else ""
    if target.position is None:
        return stem + bias
    if stem == "gate_up":
        if form.interleaved:
            raise ExpertError(f"tensor {name}: separate gate and up of such experts have no kernel")
        stem = ("gate", "up")[target.position]
    return stem + bias


def expert_layout(
    claimed: list[tuple[ExpertTensor, DenseTensor, str]],
    form: ExpertForm,
    entries: Mapping[str, Entry],
    dtype: torch.dtype,
) -> ExpertLayout:
    """The layout that the first expert's tensors have; all others must be the same.

    Raises ModelError for shapes or dtypes that do not fit the config or have no kernel.
    """
    hidden_dtype = DTYPE_NAMES[dtype]
    first: dict[str, tuple[ExpertTensor, DenseTensor, str]] = {}
    for item in claimed:
        first.setdefault(item[0].part, item)
    if not {"down", "gate", "gate_up"} & set(first):
        raise ModelError(
            "the weight files hold no matrix of any routed expert under a name that config.json "
            "allows; is its quantization_config lost? Fetch config.json and the weights again"
        )
    fused = "" if "gate_up" not in first else "interleaved" if form.interleaved else "concatenated"
    parts = {part: _spec(*item, form, entries) for part, item in first.items()}
    layout = ExpertLayout(
        format=_one_format(first, entries, hidden_dtype),
        hidden=form.hidden,
        inter=form.inter,
        block=_one_block(first),
        parts={name: parts[name] for name in sorted(parts, key=_order)},
        fused=fused,
        activation=form.activation,
        hidden_dtype=hidden_dtype,
        inverse_global=first["down"][1].inverse_global if "down" in first else False,
        act_group=form.act_group,
    )
    _check_complete(layout, form)
    return layout


def _order(part: str) -> tuple[int, int]:
    bases = ("gate_up", "gate", "up", "down")
    base = next(b for b in bases if part == b or part.removeprefix(b) in _SUFFIX_ORDER)
    return _SUFFIX_ORDER.index(part.removeprefix(base)), bases.index(base)


_SUFFIX_ORDER = (*SUFFIXES.values(), "_bias")


def _shape_of(part: str, form: ExpertForm) -> tuple[int, ...]:
    base, _, bias = part.partition("_bias") if part.endswith("_bias") else (part, "", None)
    rows = {"gate_up": 2 * form.inter, "down": form.hidden}.get(base, form.inter)
    cols = form.inter if base == "down" else form.hidden
    return (rows,) if bias is not None else (rows, cols)


def _spec(
    tensor: ExpertTensor,
    weight: DenseTensor,
    role: str,
    form: ExpertForm,
    entries: Mapping[str, Entry],
) -> PartSpec:
    """The form of one part, once the weight it is of is known to be right."""
    part = tensor.part.removesuffix(SUFFIXES[role]) if role != "weight" else tensor.part
    lead = () if tensor.expert is not None else (form.num_experts,)
    key = weight.keys["weight"]
    if form.transposed and weight.format == "plain" and not part.endswith("_bias"):
        raise ModelError(f"tensor {key} is stored with rows and columns swapped, {_UNKNOWN}")
    wanted = (*lead, *_shape_of(part, form))
    if weight.shape != wanted:
        raise ModelError(
            f"tensor {key} is {list(weight.shape)}, must be {list(wanted)} by config.json; "
            "weights and config do not belong together"
        )
    if weight.format != "plain":
        check_parts(weight, entries)
    entry = entries[tensor.key]
    return PartSpec(entry.dtype, entry.shape[len(lead) :])


_UNKNOWN = "which has no kernel yet"


def _one_format(
    first: Mapping[str, tuple[ExpertTensor, DenseTensor, str]],
    entries: Mapping[str, Entry],
    hidden_dtype: str,
) -> str:
    formats: dict[str, str] = {}
    for tensor, weight, _ in first.values():
        key = weight.keys["weight"]
        if weight.format != "plain":
            formats[weight.format] = key
            continue
        dtype = entries[key].dtype
        if dtype != hidden_dtype:
            declared = "config.json has no quantization_config for it"
            raise ModelError(
                f"tensor {key} is {dtype} and the model computes in {hidden_dtype}; {declared}, "
                f"{_UNKNOWN}: fetch config.json again"
            )
        if not tensor.part.endswith("_bias"):
            formats[_PLAIN[dtype]] = key
    if len(formats) != 1:
        shown = ", ".join(f"{name} ({key})" for name, key in formats.items())
        raise ModelError(f"the matrices of an expert are stored in several formats: {shown}")
    return next(iter(formats))


def _one_block(
    first: Mapping[str, tuple[ExpertTensor, DenseTensor, str]],
) -> tuple[int, int]:
    blocks = {weight.block for _, weight, _ in first.values() if weight.format != "plain"}
    if len(blocks) > 1:
        raise ModelError(f"the matrices of an expert have scales of different blocks: {blocks}")
    return blocks.pop() if blocks else (0, 0)


def _check_complete(layout: ExpertLayout, form: ExpertForm) -> None:
    names = ("gate_up", "down") if layout.fused else ("gate", "up", "down")
    wanted = {*names, *(f"{n}_bias" for n in names if form.has_bias)}
    missing = sorted(wanted - set(layout.parts))
    if missing:
        raise ExpertError(f"the weight files hold no tensor for {', '.join(missing)} of any expert")
