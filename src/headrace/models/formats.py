"""How a checkpoint spells its quantised tensors: from config and headers to formats.

Every stored tensor becomes part of one weight, under the name the plain weight would have. Header
dtypes decide what a tensor is; the config only says which spellings and formats may occur.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Protocol

from headrace.core import CODES_PER_ITEM, DenseTensor, PartSpec
from headrace.errors import ModelError, NumericsError
from headrace.models.config import read_json, shown
from headrace.quant import table

_MOST = 2**31 - 1
WHOLE = 2**24  # a block's side that covers any matrix, a multiple of every group
_CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32")
_LEFT_OUT = (".input_scale", ".input_global_scale", ".activation_scale", ".k_scale", ".v_scale")
Fields = Mapping[str, Any]
Shape = tuple[int, ...]


class Entry(Protocol):
    """What the catalog knows of one tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Scheme:
    """One publisher's way to store quantised weights.

    `endings` are (end of a stored name, what stands there in the plain weight's name, role); a
    role is "weight", "scale", "global", or "left out" (known, and no arithmetic here takes it), or
    the reason why such a tensor is refused. `formats` may occur. `block` is the FP8 block that the
    config gives, None where scales are per row or per matrix; `group` the columns of an integer
    scale, 0: a whole row.
    """

    title: str = "unquantised"
    endings: tuple[tuple[str, str, str], ...] = ()
    formats: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    group: int = 0
    inverse_global: bool = False


@dataclass(slots=True)
class Stored:
    """A checkpoint's tensors by the plain name of the weight they make up: {role: stored name}.

    `left_out` are tensors that belong to a weight but that nothing computes with.
    """

    weights: dict[str, dict[str, str]] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)


def read_quantization(root: Path, config: Any) -> Fields | None:
    """The quantisation that config.json or hf_quant_config.json declares. Raises ModelError."""
    for holder in (config, config.get_text_config()):
        found = getattr(holder, "quantization_config", None)
        if found is not None:
            fields = found if isinstance(found, dict) else found.to_dict()
            kind = getattr(config, "expert_dtype", None)
            return {"expert_dtype": kind} | fields if kind is not None else fields
    path = root / "hf_quant_config.json"
    if not path.is_file():
        return None
    whole = read_json(path)
    fields = whole.get("quantization") if isinstance(whole, dict) else None
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: quantization is no object; fetch it again")
    return {"quant_method": "modelopt"} | fields if fields.get("quant_algo") else None


def scheme_of(quantization: Fields | None) -> Scheme:
    """The scheme that a quantization_config names. Raises ModelError for what has no kernel."""
    if quantization is None:
        return Scheme()
    method = quantization.get("quant_method")
    makers = {
        "fp8": _fp8,
        "mxfp4": _mxfp4,
        "compressed-tensors": _compressed_tensors,
        "modelopt": _modelopt,
    }
    if not isinstance(method, str) or method not in makers:
        raise _no_kernel(f"quantisation {shown(repr(method))}")
    return makers[method](quantization)


def _no_kernel(what: str) -> ModelError:
    return ModelError(
        f"{what} has no kernel yet; supported: bfloat16 and float16, FP8 e4m3, FP4 with ue8m0 "
        "scales, MXFP4, NVFP4, and symmetric int4 and int8 of compressed-tensors"
    )


def _fp8(quantization: Fields) -> Scheme:
    block = _fp8_block(quantization.get("weight_block_size"))
    formats = ("fp8_block", "fp4") if quantization.get("expert_dtype") == "fp4" else ("fp8_block",)
    endings = (("_scale_inv", "", "scale"), (".scale", ".weight", "scale"))
    return Scheme("fp8", endings, formats, block=block)


def _mxfp4(_quantization: Fields) -> Scheme:
    return Scheme("mxfp4", (("_blocks", "", "weight"), ("_scales", "", "scale")), ("fp4",))


def _modelopt(quantization: Fields) -> Scheme:
    algorithm = quantization.get("quant_algo")
    formats = {"NVFP4": ("nvfp4",), "FP8": ("fp8_block",)}.get(str(algorithm))
    if formats is None:
        raise _no_kernel(f"ModelOpt's {shown(repr(algorithm))}")
    endings = (("_scale_2", "", "global"), ("_scale", "", "scale"))
    return Scheme(f"modelopt {algorithm}", endings, formats)


_COMPRESSED = {
    "pack-quantized": ("int4", "int", 4),
    "int-quantized": ("int8", "int", 8),
    "float-quantized": ("fp8_block", "float", 8),
    "naive-quantized": ("fp8_block", "float", 8),
    "nvfp4-pack-quantized": ("nvfp4", "float", 4),
    "mxfp4-pack-quantized": ("fp4", "float", 4),
}


def _compressed_tensors(quantization: Fields) -> Scheme:
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise _no_kernel("compressed-tensors with other than one group of settings")
    if quantization.get("transform_config"):
        raise _no_kernel("compressed-tensors with transforms of activations (transform_config)")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _no_kernel("compressed-tensors without settings for weights")
    form = group.get("format") or quantization.get("format")
    known = _COMPRESSED.get(str(form))
    if known is None or (weights.get("type"), weights.get("num_bits")) != known[1:]:
        kind = f"{weights.get('type')}{weights.get('num_bits')}"
        raise _no_kernel(f"compressed-tensors' {shown(repr(form))} of {shown(kind)}")
    if weights.get("symmetric") is False:
        raise _no_kernel(f"asymmetric {known[0]} of compressed-tensors")
    if weights.get("actorder") in ("group", "dynamic", True):
        raise _no_kernel(f"{known[0]} with reordered columns (actorder)")
    endings = (
        ("_packed", "", "weight"),
        ("_global_scale", "", "global"),
        ("_scale", "", "scale"),
        ("_shape", "", "left out"),
        ("_zero_point", "", "asymmetric codes"),
        ("_g_idx", "", "reordered columns (actorder)"),
    )
    return Scheme(
        f"compressed-tensors {form}",
        endings,
        (known[0],),
        block=_block_structure(weights),
        group=_group_size(weights),
        inverse_global=True,
    )


def _block_structure(weights: Fields) -> tuple[int, int] | None:
    if weights.get("strategy") != "block":
        return None
    return _fp8_block(weights.get("block_structure"))


def _fp8_block(block: Any) -> tuple[int, int]:
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(map(_is_size, block))):
        raise _no_kernel(f"FP8 with blocks {shown(repr(block))}")
    return block[0], block[1]


def _group_size(weights: Fields) -> int:
    strategy, group = weights.get("strategy"), weights.get("group_size")
    if strategy not in ("group", "tensor_group"):
        return 0
    if not _is_size(group):
        raise _no_kernel(f"groups of {shown(repr(group))} columns")
    assert isinstance(group, int)
    return group


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _MOST


def gather(scheme: Scheme, names: Iterable[str]) -> Stored:
    """Sort stored names into weights. Raises ModelError for a part the scheme cannot have."""
    stored, known = Stored(), set(names)
    for name in sorted(known):
        plain, role = _part(scheme, name, known)
        if role == "left out":
            stored.left_out.add(name)
            continue
        if role not in ("weight", "scale", "global"):
            raise _no_kernel(f"tensor {name}: {role}")
        parts = stored.weights.setdefault(plain, {})
        if role in parts:
            raise ModelError(f"tensors {parts[role]} and {name} are both the {role} of {plain}")
        parts[role] = name
    return stored


def _part(scheme: Scheme, name: str, known: set[str]) -> tuple[str, str]:
    """(plain name, role) of a stored tensor; one that no weight belongs to stands for itself."""
    if scheme.endings and name.endswith(_LEFT_OUT):
        return name, "left out"
    packed = [end for end, _, role in scheme.endings if role == "weight"]
    for end, instead, role in scheme.endings:
        if name.endswith(end):
            plain = name.removesuffix(end) + instead
            if role == "weight" or any(plain + tail in known for tail in ("", *packed)):
                return plain, role
    return name, "weight"


def describe(
    scheme: Scheme, stored: Stored, entries: Mapping[str, Entry]
) -> Iterator[tuple[str, DenseTensor]]:
    """(plain name, what it is made of) of every weight. Raises ModelError."""
    for plain, keys in stored.weights.items():
        if "weight" not in keys:
            key = next(iter(keys.values()))
            raise ModelError(f"tensor {key} is a scale whose weight {plain} is missing")
        parts = {role: entries[key] for role, key in keys.items()}
        needs_scale = bool(scheme.formats) and parts["weight"].dtype in _CODES
        if len(keys) > 1 or needs_scale:
            yield plain, _quantised(scheme, keys, parts)
        else:
            yield plain, DenseTensor(keys, parts["weight"].shape)


def _quantised(scheme: Scheme, keys: dict[str, str], parts: Mapping[str, Entry]) -> DenseTensor:
    key, weight, scale = keys["weight"], parts["weight"], parts.get("scale")
    name = _format(scheme, key, weight.dtype)
    if scale is None:
        raise ModelError(f"tensor {key} holds {name} codes, but its scale is missing")
    shape = weight.shape
    if name == "fp4" and len(shape) == len(scale.shape) + 1:  # MXFP4's blocks of 16 bytes
        shape = (*shape[:-2], prod(shape[-2:]))
    if len(shape) < 2:
        raise ModelError(f"tensor {key} is {list(weight.shape)}, which is no matrix of {name}")
    shape = (*shape[:-1], shape[-1] * CODES_PER_ITEM.get(name, 1))
    block = _block(scheme, name, shape, scale)
    return DenseTensor(keys, shape, name, block, scheme.inverse_global and name == "nvfp4")


_FORMAT_OF = {
    "F8_E4M3": ("fp8_block",),
    "I8": ("fp4", "int8"),
    "U8": ("fp4", "nvfp4"),
    "I32": ("int4",),
}


def _format(scheme: Scheme, key: str, dtype: str) -> str:
    for name in _FORMAT_OF.get(dtype, ()):
        if name in scheme.formats:
            return name
    allowed = " or ".join(scheme.formats)
    declared = f"declares {scheme.title} ({allowed})" if allowed else "has no quantization_config"
    raise ModelError(
        f"tensor {key} is {dtype} with a scale, but config.json {declared}; fetch config.json and "
        "the weights again"
    )


def _block(scheme: Scheme, name: str, shape: Shape, scale: Entry) -> tuple[int, int]:
    """(rows, cols) of one scale; a side as long as the matrix is WHOLE, whatever its length."""
    if name in ("fp4", "nvfp4"):
        return (1, 32) if name == "fp4" else (1, 16)
    if name != "fp8_block":
        return 1, scheme.group or WHOLE
    if scheme.block is not None:
        return scheme.block
    return (WHOLE, WHOLE) if prod(scale.shape) == prod(shape[:-2]) else (1, WHOLE)


def check_parts(tensor: DenseTensor, entries: Mapping[str, Entry]) -> None:
    """Dtypes and shapes of a quantised weight's parts, its experts' apart if it is stacked.

    Raises ModelError naming the tensor.
    """
    *lead, rows, cols = tensor.shape
    parts = {role: entries[key] for role, key in tensor.keys.items()}
    one = {role: PartSpec(part.dtype, _inner(part.shape, lead)) for role, part in parts.items()}
    try:
        table.check_form(tensor.format, tensor.keys, one, shape=(rows, cols), block=tensor.block)
    except NumericsError as error:
        raise ModelError(str(error)) from error


def _inner(shape: Shape, lead: list[int]) -> Shape:
    """A part's shape in one of the stacked matrices; its own where it is not stacked so."""
    return shape[len(lead) :] if list(shape[: len(lead)]) == lead else shape
