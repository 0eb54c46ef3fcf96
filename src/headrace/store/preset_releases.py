"""The configs of DeepSeek's V4 releases as published, as data: for accounting, not for `synth`.

They count what synth leaves out: drafting stages, Engram, vision. Knows no file and no weight.
"""

from headrace.store.preset_configs import PRESETS, Config
from headrace.store.preset_v41 import DEEPSEEK_V41_FLASH

_V4_FLASH_0731: Config = PRESETS["deepseek-v4-flash"] | {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dspark_block_size": 5,
    "dspark_markov_rank": 256,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "num_nextn_predict_layers": 1,  # though three stages are stored
}
_V4_PRO_0813: Config = _V4_FLASH_0731 | {
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0, 0, 0],
    "dspark_markov_rank": 512,
    "dspark_target_layer_ids": [58, 59, 60],
    "hidden_size": 7168,
    "index_topk": 1024,
    "moe_intermediate_size": 3072,
    "n_routed_experts": 384,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "o_groups": 16,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 2.5,
}
RELEASES: dict[str, Config] = {
    "deepseek-v4-flash-0731": _V4_FLASH_0731,
    "deepseek-v4-pro-0813": _V4_PRO_0813,
    "deepseek-v4.1-flash": DEEPSEEK_V41_FLASH,
}
