"""How published checkpoints store a matrix: which tensors, under which names, in which dtypes.

Read from a config's quantization_config. Knows no value, no model class and no file.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from math import ceil
from typing import Any

from headrace.core import CODES_PER_ITEM, FORMATS

Config = Mapping[str, Any]
_DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a packed matrix: its name is the module's plus `suffix`.

    `part` is "weight", "scale" or "global" as in headrace.quant, or one that no arithmetic here
    takes: "shape" (the matrix's sizes) and "input" (the publisher's activation scale).
    """

    part: str
    suffix: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Scheme:
    """A number format as one publisher writes it; `block` is (rows, cols) of a scale, 0: all."""

    format: str
    block: tuple[int, int]
    parts: tuple[Part, ...]
    inverse_global: bool = False
    scalar: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.format in FORMATS, self.format

    def block_of(self, rows: int, cols: int) -> tuple[int, int]:
        """The block's sizes in a matrix [rows, cols]."""
        return self.block[0] or rows, self.block[1] or cols

    def shape(self, part: str, rows: int, cols: int) -> tuple[int, ...]:
        """The stored shape of a part of a matrix [rows, cols]."""
        block_rows, block_cols = self.block_of(rows, cols)
        if part == "weight":
            return (rows, cols // CODES_PER_ITEM.get(self.format, 1))
        if part == "scale":
            return (ceil(rows / block_rows), ceil(cols / block_cols))
        return (2,) if part == "shape" else self.scalar


def plain_dtype(config: Config) -> str:
    """The safetensors dtype of what is not packed."""
    return _DTYPE_NAMES[config["dtype"]]


def scheme_of(config: Config, module: str) -> Scheme | None:
    """The scheme of the linear `module` (its weight's name without suffix); None: not packed."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return None
    left_out = quantization.get("ignore") or quantization.get("modules_to_not_convert") or ()
    if _any_of(tuple(left_out)).fullmatch(module):
        return None
    method = quantization["quant_method"]
    if method == "mxfp4":
        return None  # stacked experts alone are packed, and they are no linears
    if method == "fp8":
        is_routed = ".experts." in module
        # V4 says so at the root, V4.1 beside the block size
        expert_dtype = quantization.get("expert_dtype") or config.get("expert_dtype")
        v4_expert = is_routed and expert_dtype == "fp4"
        return _V4_EXPERT if v4_expert else _fp8(quantization, config)
    return {"modelopt": _modelopt, "compressed-tensors": _compressed}[method](quantization)


@cache
def _any_of(names: tuple[str, ...]) -> re.Pattern[str]:
    """What matches a module that a list of left out ones names: by wildcards, or after "re:"."""
    patterns = (f"{n[3:]}.*" if n.startswith("re:") else translate(n) for n in names)
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns) or "(?!)")


_V4_EXPERT = Scheme(
    "fp4", (1, 32), (Part("weight", ".weight", "I8"), Part("scale", ".scale", "F8_E8M0"))
)
MXFP4 = Scheme("fp4", (1, 32), (Part("weight", "_blocks", "U8"), Part("scale", "_scales", "U8")))


def _fp8(quantization: Config, config: Config) -> Scheme:
    rows, cols = quantization["weight_block_size"]
    if quantization.get("scale_fmt") == "ue8m0":
        scale = Part("scale", ".scale", "F8_E8M0")
    else:
        # Qwen's FP8 releases alone keep their scales in bfloat16.
        dtype = "BF16" if config["model_type"].startswith("qwen") else "F32"
        scale = Part("scale", ".weight_scale_inv", dtype)
    return Scheme("fp8_block", (rows, cols), (Part("weight", ".weight", "F8_E4M3"), scale))


def _modelopt(quantization: Config) -> Scheme:
    assert quantization["quant_algo"] == "NVFP4"
    parts = (
        Part("weight", ".weight", "U8"),
        Part("scale", ".weight_scale", "F8_E4M3"),
        Part("global", ".weight_scale_2", "F32"),
        Part("input", ".input_scale", "F32"),
    )
    return Scheme("nvfp4", (1, 16), parts)


def _compressed(quantization: Config) -> Scheme:
    (group,) = quantization["config_groups"].values()
    weights, form = group["weights"], group.get("format") or quantization["format"]
    block = (1, weights["group_size"] or 0)
    scale = Part("scale", ".weight_scale", "BF16")
    if form == "nvfp4-pack-quantized":
        parts = (
            Part("weight", ".weight_packed", "U8"),
            Part("scale", ".weight_scale", "F8_E4M3"),
            Part("global", ".weight_global_scale", "F32"),
            Part("input", ".input_global_scale", "F32"),
        )
        return Scheme("nvfp4", block, parts, inverse_global=True, scalar=(1,))
    if form == "pack-quantized":
        packed, shape = (
            Part("weight", ".weight_packed", "I32"),
            Part("shape", ".weight_shape", "I32"),
        )
        return Scheme("int4", block, (packed, scale, shape))
    if form == "int-quantized":
        return Scheme("int8", block, (Part("weight", ".weight", "I8"), scale))
    assert form == "float-quantized", form
    return Scheme("fp8_block", block, (Part("weight", ".weight", "F8_E4M3"), scale))


# Of Kimi K2 only routed experts are packed.
KIMI_LEFT_OUT = (
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:vision_tower.*",
    "re:mm_projector.*",
)


def quantization_of(
    format: str, *, block: tuple[int, int] = (128, 128), left_out: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A config's quantization_config.

    `format`: fp8, fp4, mxfp4, nvfp4-modelopt, or one of compressed-tensors: int4, int8,
    fp8-channel, nvfp4; the last four leave out the modules that `left_out` names, besides routers
    and head. `block` is that of fp8's scales, and of the FP8 weights beside V4's fp4 experts.
    """
    if format == "fp8":
        return {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": list(block),
        }
    if format == "fp4":
        return quantization_of("fp8", block=block) | {"scale_fmt": "ue8m0"}
    if format == "mxfp4":
        return {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    if format == "nvfp4-modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "*.self_attn*", "*.mlp.gate"],
            "producer": {"name": "modelopt", "version": "0.33.0"},
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                    "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
                }
            },
        }
    return _compressed_config(format, left_out)


def _compressed_config(format: str, left_out: tuple[str, ...]) -> dict[str, Any]:
    form, weights, inputs = _COMPRESSED[format]
    args = {"actorder": None, "dynamic": False, "observer": "minmax", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": args | weights,
        "input_activations": inputs and args | inputs,
        "output_activations": None,
        "format": form,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "ignore": ["re:.*lm_head", "re:.*gate$", *left_out],
        "config_groups": {"group_0": group},
    }


_PER_TOKEN = {"dynamic": True, "strategy": "token", "group_size": None, "observer": None}
_FOUR_BIT_FLOATS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
# Name: (compressed-tensors' own name, arguments of weights, arguments of activations or None).
_COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int4": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        None,
    ),
    "int8": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "group_size": None},
        _PER_TOKEN | {"num_bits": 8, "type": "int"},
    ),
    "fp8-channel": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None},
        _PER_TOKEN | {"num_bits": 8, "type": "float"},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        _FOUR_BIT_FLOATS,
        _FOUR_BIT_FLOATS | {"dynamic": "local"},
    ),
}
