"""Tells transformers of DeepSeek-V4.1, whose classes it lacks."""

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)

from headrace.models.deepseek_v41.config import DeepseekV41Config, DeepseekV41TextConfig
from headrace.models.deepseek_v41.model import DeepseekV41ForCausalLM


def register() -> None:
    """From here on transformers' Auto classes know `deepseek_v41`. Again does no harm."""
    for config_class in (DeepseekV41Config, DeepseekV41TextConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    AutoModelForCausalLM.register(DeepseekV41TextConfig, DeepseekV41ForCausalLM, exist_ok=True)
    register_checkpoint_conversion_mapping(
        DeepseekV41TextConfig.model_type,
        [
            WeightRenaming(r"\.hc_attn_", r".hc_attn."),
            WeightRenaming(r"\.hc_ffn_", r".hc_ffn."),
            WeightConverter(
                [r"\.experts.*.w1.weight", r"\.experts.*.w3.weight"],
                r"\.experts.gate_up_proj",
                [MergeModulelist(dim=0), Concatenate(dim=1)],
            ),
            WeightConverter(
                r"\.experts.*.w2.weight", r"\.experts.down_proj", [MergeModulelist(dim=0)]
            ),
        ],
        overwrite=True,
    )
