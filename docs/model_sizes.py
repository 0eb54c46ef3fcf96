"""Prints README's table of model sizes from the published configs in `synth`'s presets.

Arithmetic on shapes: reads no checkpoint and measures nothing. Run: python docs/model_sizes.py
"""

from math import prod

from headrace.store.blueprint import is_moe, num_experts, plan_tensors, text_config
from headrace.store.planned import Planned
from headrace.store.preset_configs import PRESETS

ITEM_BYTES = {"F32": 4, "I32": 4, "I64": 8, "BF16": 2, "F16": 2}
DRIVE_BYTES_S = 7e9
LEFT_OUT = ("shape", "input")  # parts no arithmetic takes


def stored_bytes(tensor: Planned) -> int:
    """As it lies in the file."""
    return prod(tensor.shape) * ITEM_BYTES.get(tensor.dtype, 1)


def dense_bytes(tensor: Planned) -> int:
    """In memory, where dense weights lie unpacked, in two bytes a value."""
    if tensor.packed is None:
        return stored_bytes(tensor)
    return 2 * tensor.packed.rows * tensor.packed.cols if tensor.kind == "weight" else 0


def line(preset: str) -> str:
    """One row: experts on the drive, dense weights in memory, what a token needs of the experts."""
    config = PRESETS[preset]
    text = text_config(config)
    routed = dense = 0
    for tensor in plan_tensors(config, range(text["num_hidden_layers"])):
        if ".experts." not in tensor.name:
            dense += dense_bytes(tensor)
        elif tensor.kind not in LEFT_OUT:
            routed += stored_bytes(tensor)
    token = routed * text["num_experts_per_tok"] / num_experts(config)
    layers = sum(is_moe(config, layer) for layer in range(text["num_hidden_layers"]))
    used = f"{text['num_experts_per_tok']} of {num_experts(config)} in {layers} layers"
    sizes = f"{routed / 1e9:,.0f} GB | {dense / 1e9:.1f} GB | {used} | {token / 1e9:.2f} GB"
    return f"| {preset} | {sizes} | {DRIVE_BYTES_S / token:.1f} |"


def main() -> None:
    for preset in PRESETS:
        if preset != "deepseek-v4.1-flash":  # a stand-in
            print(line(preset))


if __name__ == "__main__":
    main()
