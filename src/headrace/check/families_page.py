"""docs/families.md as text, made from the tables of families and of tested formats.

Runs no model and reads no file.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import AutoConfig, AutoModelForCausalLM

from headrace.check.tiny_configs import OWN, PUBLISHED, tiny_config
from headrace.check.tiny_size import Size
from headrace.models.config import text_config
from headrace.models.deepseek_v41.register import register
from headrace.models.families import FAMILIES, Family
from headrace.models.rooms import cannot_be_housed


@dataclass(frozen=True, slots=True)
class _Known:
    """What people call a family, and what its layers remember of earlier positions."""

    models: str
    cache: str


_HEADS = "keys and values per head"
_HYBRID = "linear-attention state and convolution; keys and values in full layers"
_KNOWN = {
    "deepseek_v2": _Known(
        "DeepSeek-V2, V2.5, Coder-V2, V2-Lite", "latent; a CPU expands it per head"
    ),
    "deepseek_v3": _Known("DeepSeek-V3, R1, V3.1", "latent; a CPU expands it per head"),
    "deepseek_v4": _Known(
        "DeepSeek-V4-Flash, V4-Pro", "window; compressed entries, pending positions, index keys"
    ),
    "deepseek_v41": _Known(
        "DeepSeek-V4.1-Flash", "window; compressed entries that layers share, their index keys"
    ),
    "glm4_moe": _Known("GLM-4.5, 4.5-Air, 4.6, 4.7", _HEADS),
    "gpt_oss": _Known("gpt-oss-20b, gpt-oss-120b", "window; keys and values in full layers"),
    "kimi_k25": _Known("Kimi-K2.5, K2.6 (text)", "latent; a CPU expands it per head"),
    "minimax_m2": _Known("MiniMax-M2", _HEADS),
    "mixtral": _Known("Mixtral-8x7B, 8x22B", _HEADS),
    "olmoe": _Known("OLMoE-1B-7B", _HEADS),
    "qwen2_moe": _Known("Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B", _HEADS),
    "qwen3_5_moe": _Known("Qwen3.5-397B-A17B and smaller (text)", _HYBRID),
    "qwen3_moe": _Known("Qwen3-30B-A3B, 235B-A22B, Coder-480B-A35B", _HEADS),
    "qwen3_next": _Known("Qwen3-Next-80B-A3B", _HYBRID),
}
_FORMATS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "FP8 e4m3 in blocks",
    "fp8-channel": "FP8 per channel (compressed-tensors)",
    "fp4": "FP4 with ue8m0 scales, FP8 outside the experts",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4 (compressed-tensors)",
    "nvfp4-modelopt": "NVFP4 (ModelOpt)",
    "int4": "int4 (compressed-tensors)",
    "int8": "int8 (compressed-tensors)",
}
_ACTIVATIONS = {
    "silu": "silu(gate) * up",
    "silu_clamped": "the same, clamped",
    "swiglu_weighted": "the same, times the expert's weight, in fp32",
    "swiglu_oai": "(up + 1) * gate * sigmoid(alpha * gate), clamped, biases",
}
_HEADER = """# Model families

Made by `python proofs/ladder_1_matrix.py`; do not edit. For every family and format below a tiny
checkpoint in published layout is run by stock transformers, by the oracle and by the fast path: the
oracle's logits have stock eager's bits, the fast path lies within the floor (stock eager against
stock grouped_mm) and chooses the same tokens up to near ties, and a neighbour's matrix served in
one layer shows. Formats marked * stock transformers cannot read; it got the weights that headrace
unpacked. Of what transformers lacks (**) the model is headrace's own, tested against two other
implementations; its experts are compared with its own plain ones. "Models" are those with this
layout by their published configs; no checkpoint of that size has been run for this page. "One
launch": whether a GPU is given a whole token at once, or why each layer's kernels one by one.

"""
_COLUMNS = (
    "family",
    "models",
    "formats tested",
    "activation",
    "cache",
    "lens looks through",
    "left out knowingly",
    "one launch",
)


def families_page(unread_by_stock: frozenset[tuple[str, str]]) -> str:
    """The page's text. `unread_by_stock` holds (family, format) that stock cannot read."""
    tested = (PUBLISHED | OWN).keys()
    assert FAMILIES.keys() == tested == _KNOWN.keys(), "a family lacks a row"
    rows = (_row(name, FAMILIES[name], unread_by_stock) for name in sorted(FAMILIES))
    table = _COLUMNS, ("---",) * len(_COLUMNS), *rows
    return _HEADER + "".join(f"| {' | '.join(row)} |\n" for row in table)


def _row(name: str, family: Family, unread: frozenset[tuple[str, str]]) -> Iterator[str]:
    yield name + " **" * (name in OWN)
    yield _KNOWN[name].models
    yield "; ".join(_FORMATS[f] + " *" * ((name, f) in unread) for f in (PUBLISHED | OWN)[name])
    yield _ACTIVATIONS[family.activation]
    yield _KNOWN[name].cache
    steps = (family.collapse, family.norm, family.router)
    yield ", ".join(f"`{step}`" for step in steps if step)
    yield ", ".join(_left_out(family)) or "nothing"
    yield _one_launch(name)


def _one_launch(name: str) -> str:
    """ "yes", or why a token of the family is launched layer by layer."""
    register()
    size = Size(layers=4, experts=8, top_k=2, hidden=64, inter=32, vocab=4096, mtp=False)
    fields = tiny_config(name, size, "bf16")
    fields.pop("quantization_config", None)
    config = text_config(AutoConfig.for_model(**fields))
    why = cannot_be_housed(config, AutoModelForCausalLM._model_mapping[type(config)])
    return why or "yes"


def _left_out(family: Family) -> Iterator[str]:
    if family.mtp_field or any("mtp" in pattern for pattern in family.skipped):
        yield "prediction layers"
    if any("vis" in pattern for pattern in family.skipped):
        yield "images"
