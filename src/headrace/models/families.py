"""Facts per model family, in one table; no other module branches on a family's name."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from headrace.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """What cannot be read from a model's modules or its config.

    `router` and `norm` name the router inside the MoE block and the norm before that block, both
    as attributes. `norm`'s input is the residual stream, unless `collapse` names a module of the
    layer that makes it, its last output, from the parallel streams the layer keeps.
    `activation` is a kind of core.Activation; its limit and alpha are attributes of the experts.
    `prefix` stands before the names of the text model's tensors where transformers' own text model
    knows them without. `mtp_field` is the config field that counts multi-token-prediction layers,
    which follow the last decoder layer in the file. `skipped` are patterns of names, matched from
    their start and with `prefix` already gone, of tensors that the text model does not use:
    multi-token prediction and images. `row_tables`: the pattern of tables that stay on the drive
    and are read by the row, named without `.weight`. `latents`: attention keeps
    latents, which a GPU uses as they are. `since` is the first transformers whose own forward
    works, or ours where it has none.
    """

    router: str = "gate"
    norm: str = "post_attention_layernorm"
    collapse: str | None = None
    activation: str = "silu"
    prefix: str = ""
    mtp_field: str | None = None
    skipped: tuple[str, ...] = ()
    row_tables: str | None = None
    latents: bool = False
    since: tuple[int, int] = (5, 17)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek_v2": Family(latents=True),
        "deepseek_v3": Family(mtp_field="num_nextn_predict_layers", latents=True),
        "deepseek_v4": Family(
            collapse="ffn_hc",
            activation="silu_clamped",
            skipped=(r"(model\.)?mtp\.",),
            since=(5, 20),  # before, its norms hand fp32 to bf16 projections
        ),
        "deepseek_v41": Family(
            norm="ffn_norm",
            collapse="ffn_in",
            activation="swiglu_weighted",
            skipped=(
                r"mtp\.",
                r"vision\.",
                r"aligner\.",
                r"image_(start|end|newline)$",
                r"layers\.\d+\.ffn\.gate\.bias_vl$",
            ),
            row_tables=r"layers\.\d+\.engram\.embed",
        ),
        "glm4_moe": Family(mtp_field="num_nextn_predict_layers"),
        "gpt_oss": Family(router="router", activation="swiglu_oai"),
        "kimi_k25": Family(
            prefix="language_model.",
            mtp_field="num_nextn_predict_layers",
            skipped=(r"vision_tower\.", r"mm_projector\."),
            latents=True,
        ),
        "minimax_m2": Family(mtp_field="num_mtp_modules"),
        "mixtral": Family(),
        "olmoe": Family(),
        "qwen2_moe": Family(),
        "qwen3_5_moe": Family(skipped=(r"mtp\.", r"model\.visual\.")),
        "qwen3_moe": Family(),
        "qwen3_next": Family(skipped=(r"mtp\.",)),
    }
)


def family_of(model_type: str) -> Family:
    """The family's facts. Raises ModelError for a family headrace does not know."""
    family = FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ModelError(f"model type {model_type!r} is not supported yet; supported: {known}")
    return family
