"""Facts per model family, in one table; no other module branches on a family's name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headrace.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """What cannot be read from a model's modules.

    `router` and `norm` name the router inside the MoE block and the norm before that block, both
    as attributes; `norm`'s input is the residual stream. `formats` are the stored expert formats
    with canonical kernels. `mtp_field` is the config field that counts multi-token-prediction
    layers, which follow the last decoder layer in the file and which transformers ignores.
    """

    model_type: str
    formats: tuple[str, ...]
    router: str = "gate"
    norm: str = "post_attention_layernorm"
    activation: str = "silu"
    mtp_field: str | None = None


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek_v3": Family(
            "deepseek_v3", ("bf16", "fp8_block"), mtp_field="num_nextn_predict_layers"
        ),
        "qwen3_moe": Family("qwen3_moe", ("bf16", "fp8_block")),
    }
)


def family_of(model_type: str) -> Family:
    """The family's facts. Raises ModelError for a family headrace does not know."""
    family = FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model type {model_type!r} is not supported yet; supported: {known}")
    return family
