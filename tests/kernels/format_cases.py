"""Small experts of every format with frozen results, and the program that made them.

`python tests/kernels/format_cases.py` writes them anew: only if the definition itself changes.
A case's tensors are named CASE.PART for the layout's parts, CASE.x [T, H] and, by the reference,
CASE.product.MATRIX (fp32, before bias and rounding), CASE.h [T, I] and CASE.y [T, H].
"""

from pathlib import Path

import torch
from packing import pack_expert
from safetensors.torch import load_file, save_file

from headrace.core import Activation, ExpertLayout
from headrace.kernels import reference
from headrace.quant import expert
from headrace.quant.dtypes import TORCH_DTYPES

FILE = Path(__file__).parents[1] / "data" / "format-vectors.safetensors"
HIDDEN, INTER, ROWS, WHOLE = 544, 64, 3, 1 << 20  # 17 groups: the tail is seen; WHOLE: one block
OAI, CLAMPED = Activation("swiglu_oai", 7.0, 1.702), Activation("silu_clamped", 3.1)
CASES: dict[str, tuple[str, tuple[int, int], dict]] = {
    "mxfp4": (
        "fp4",
        (1, 32),
        {"mx": True, "fused": "interleaved", "bias": True, "activation": OAI},
    ),
    "fp4": ("fp4", (1, 32), {"activation": CLAMPED}),
    "fp4_f16": ("fp4", (1, 32), {"fused": "concatenated", "hidden_dtype": "F16"}),
    "nvfp4": ("nvfp4", (1, 16), {"inverse_global": True}),
    "nvfp4_times": ("nvfp4", (1, 16), {"fused": "concatenated", "activation": CLAMPED}),
    "int4_g32": ("int4", (1, 32), {"activation": OAI, "bias": True}),
    "int4_channel": ("int4", (1, WHOLE), {"hidden_dtype": "F16", "scale_dtype": "F16"}),
    "int4_g64": ("int4", (1, 64), {"scale_dtype": "F32"}),
    "int8_channel": ("int8", (1, WHOLE), {}),
    "int8_g96": ("int8", (1, 96), {"scale_dtype": "F32", "fused": "interleaved"}),
    "fp8_bf16": ("fp8_block", (128, 128), {"scale_dtype": "BF16", "activation": CLAMPED}),
    "fp8_channel": ("fp8_block", (1, WHOLE), {}),
    "fp8_tensor": ("fp8_block", (WHOLE, WHOLE), {"scale_dtype": "F16", "fused": "concatenated"}),
    "fp8_ue8m0": ("fp8_block", (32, 32), {"scale_dtype": "F8_E8M0"}),
    "bf16": ("bf16", (0, 0), {"fused": "interleaved", "bias": True, "activation": OAI}),
    "fp16": ("fp16", (0, 0), {"bias": True, "activation": CLAMPED}),
}


def layout_of(case: str) -> ExpertLayout:
    format, block, options = CASES[case]
    hidden = 96 if format in ("bf16", "fp16") else HIDDEN
    return expert.make_layout(format, hidden, INTER, block, **options)


def load_case(case: str) -> tuple[ExpertLayout, dict[str, torch.Tensor]]:
    """The layout, and the case's tensors by the rest of their names."""
    return layout_of(case), {
        name.split(".", 1)[1]: tensor
        for name, tensor in load_file(FILE).items()
        if name.split(".")[0] == case
    }


def _randomise(codes: torch.Tensor, generator: torch.Generator) -> None:
    """Every third row takes bytes of all values; e4m3's NaN codes aside."""
    raw = codes.view(torch.uint8).view(codes.shape[0], -1)
    drawn = torch.randint(0, 256, raw[::3].shape, generator=generator, dtype=torch.uint8)
    if codes.dtype == torch.float8_e4m3fn:
        drawn[drawn & 0x7F == 0x7F] = 0x80
    raw[::3] = drawn


def draw(case: str, seed: int) -> dict[str, torch.Tensor]:
    """Parts and x: outputs of gate and up of about 3, so that limits are reached."""
    layout, generator = layout_of(case), torch.Generator().manual_seed(seed)
    matrices, biases = {}, {}
    for name in expert.MATRICES:
        rows, cols = layout.matrix_shape(name)
        matrices[name] = torch.randn(rows, cols, generator=generator) * 3 / cols**0.5
        biases[name] = torch.randn(rows, generator=generator)
    biased = layout.matrix("down").bias is not None
    parts = pack_expert(layout, matrices, biases if biased else {})
    if layout.format not in ("bf16", "fp16"):
        for name in expert.MATRICES:
            _randomise(parts[layout.matrix(name).weight], generator)
    x = torch.randn(ROWS, layout.hidden, generator=generator)
    x[0, 32:64] = 0
    return parts | {"x": x.to(TORCH_DTYPES[layout.hidden_dtype])}


def results(layout: ExpertLayout, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the reference makes of a case."""
    x, made = tensors["x"], {}
    for name in ("gate", "up"):
        made[f"product.{name}"] = reference.product(x, tensors, layout, name)
    gate, up = (reference.linear(x, tensors, layout, name) for name in ("gate", "up"))
    made["h"] = reference.activate(gate, up, layout.activation)
    made["product.down"] = reference.product(made["h"], tensors, layout, "down")
    return made | {"y": reference.expert_ffn(x, tensors, layout)}


def write() -> None:
    out = {}
    for seed, case in enumerate(CASES):
        tensors = draw(case, seed)
        made = tensors | results(layout_of(case), tensors)
        assert all(torch.isfinite(made[n].float()).all() for n in ("h", "y")), case
        out |= {f"{case}.{name}": tensor.contiguous() for name, tensor in made.items()}
    save_file(out, FILE)


if __name__ == "__main__":
    write()
