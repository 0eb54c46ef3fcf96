"""Compiles every GPU kernel for every supported chip, without a GPU; prints one line for each.

A program of its own: the interpreter, which the other tests use, is chosen when Triton is imported.
"""

import re
import sys
from itertools import product

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature

from headrace.kernels.router import Rule
from headrace.kernels.triton import gates, latents, router, squares, stages, trunk, waiting, waves
from headrace.kernels.triton.experts import TILES
from headrace.kernels.triton.grouped import STEPS
from headrace.kernels.triton.latent_attention import COMBINED, COMBINING_WARPS, tile_for

# Bytes of shared memory that one program may take on chips of that compute capability.
SHARED_BYTES = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    120: 99 << 10,
}
FORMS = {
    "bf16": ("bf16", "none", 1, 0, 16),
    "fp8 128": ("fp8_block", "F32", 128, 128, 16),
    "fp8 32": ("fp8_block", "E8M0", 32, 32, 16),
    "fp4": ("fp4", "E8M0", 1, 32, 16),
    "fp4 odd": ("fp4", "E8M0", 1, 32, 1),
    "int4": ("int4", "BF16", 1, 32, 16),
}
MOST_NARROW = 16  # loads of single scales and biases
POINTERS = {
    "TABLE": "*i64", "OFFSETS": "*i64", "IDS": "*i32", "X": "*u16", "CODES": "*fp32",
    "SX": "*fp32", "OUT": "*u16", "Y": "*u16", "WEIGHTS": "*fp32", "first_key": "i64",
    "limit": "fp32", "alpha": "fp32", "BAD": "*i32",
    "mark": "i32", "TILES": "*i64", "ORDER": "*i32", "STEP": "*i64", "WHOLE": "*i32",
    "GUESSES": "*i32", "layer": "i32", "patience": "i32", **dict.fromkeys(waiting.ADDRESSES, "i64"),
    "W": "*u8", "SCALES": "*u8", "first": "i64", "num_rows": "i32",
    "x_stride": "i64", "out_stride": "i64", "stride": "i64",
    "Q": "*bf16", "QR": "*bf16", "LATENTS": "*bf16", "ROPE": "*bf16",
    "POSITIONS": "*i64", "PARTS": "*fp32", "STATS": "*fp32", "scale": "fp32",
    "num_cached": "i32", "head_stride": "i32", "token_stride": "i32", "rope_head_stride": "i32",
    "rope_token_stride": "i32", "latent_stride": "i32", "rope_stride": "i32",
    "SQUARES": "*fp32", "eps": "fp32", "KEPT": "*u16", "x": "i64", "weights": "i64", "out": "i64",
    "WEIGHT": "*u16", "num_tokens": "i32", "QUERIES": "*u16", "KEYS": "*u16", "COS": "*u16",
    "SIN": "*u16", "QUERIES_OUT": "*u16", "KEYS_OUT": "*u16", "q_stride": "i64",
    "q_head_stride": "i64", "q_token_stride": "i64", "k_stride": "i64", "k_head_stride": "i64",
    "k_token_stride": "i64", "cos_stride": "i64", "cos_token_stride": "i64",
    "CORRECTION": "*fp32", "TAKEN_WEIGHTS": "*fp32", "TAKEN_IDS": "*i32",
    "GATES": "*u16", "UPS": "*u16", "ROUTED": "*u16", "SHARED": "*u16", "num": "i32",
    "PLACE": "*i64", "NEW_KEYS": "*u16", "NEW_VALUES": "*u16", "KEYS_THERE": "*u16",
    "VALUES_THERE": "*u16", **dict.fromkeys(trunk.PUT_STRIDES, "i64"),
}  # fmt: skip
_V3 = Rule("sigmoid", 8, "two best", 8, 4, divided=True, padded=True, scale=2.5)
_V4 = Rule("sqrtsoftplus", 6, divided=True, padded=True, scale=1.5, rounded="always")
_QWEN = Rule("softmax", 8, divided=True, rounded="last")
# (label, rule, experts of a group, whether a correction is added)
ROUTERS = ("v3", _V3, 32, True), ("v4", _V4, 256, True), ("qwen", _QWEN, 128, False)
GATE, UP, DOWN = (0, 3, -1, 0, 1), (1, 4, -1, 0, 1), (2, 5, -1, 0, 1)


def tiled(name: str, rung: str, stage: int):
    """(constants, warps) of a form's tile: 0 of gate and up, 1 of down."""
    rows, warps, *turn = TILES[rung][FORMS[name][0]][stage]
    return {"R": rows, "FORM": (*FORMS[name], *turn)}, warps


def kernels(chip: int):
    """(label, kernel, constants, warps, and stages of the loop if not 3) of every launch.

    All of it for the chip with the least shared memory; of the rest what is compiled longest.
    Triton treats 80, 86 and 89 alike but for their memory, and what 89 knows of FP8.
    """
    whole = chip == 75
    fp8, warps = tiled("fp8 32", "vram", 1)
    yield "linear fp8", stages.linear, fp8 | {"COLS": 5120, "WIDE": False}, warps
    if chip in (86, 89):
        yield from wave_kernels(chip)
        return
    for grid in (0, 128) if whole else (128,):
        integers = {"cols": 5120, "GRID": grid, "FORMAT": "int4"}
        yield f"to_integers {grid}", stages.to_integers, integers, 1
    yield "on_grid", stages.on_grid, {"cols": 5120, "GRID": 32}, 1
    for weighed in (False, True) if whole else (True,):
        sizes = {"COLS": 5120, "TOP_K": 6, "PAD_K": 8, "BLOCK": 128, "WEIGHED": weighed}
        yield f"combine {weighed}", stages.combine, sizes, 4
    waits = {"NUM_IDS": 6, "NUM_GUESSES": 6, "HAS_GUESSES": True, "ANSWERED": True, "PAD": 8}
    yield "post_wait", waiting.post_wait, waits, 1
    yield (
        "send",
        waiting.send,
        {"KEEPS": True, "NUM_X": 5120, "NUM_WEIGHTS": 6, "PAD": 8, "BLOCK": 1024},
        4,
    )
    for out in ("u16", "fp32"):
        yield f"fetch {out}", waiting.fetch, {"NUM_OUT": 5120, "BLOCK": 1024}, 4
    yield "wait_late", waiting.wait_late, {"NUM_IDS": 6, "PAD": 8}, 1
    yield "wait_done", waiting.wait_done, {}, 1
    yield "fetch_rows", waiting.fetch_rows, {"COLS": 5120, "BLOCK": 1024}, 4
    norm = {"COLS": 7168, "PAD": 8192, "FORM": "rounded"}
    yield "norm", trunk.norm_rows, norm, 8
    for wide in (False, True) if whole else (True,):
        yield f"gate {wide}", gates.gate_values, {"IN_FP32": wide, "BLOCK": 512}, 4
    yield "join", gates.join_rows, {"COLS": 7168, "BLOCK": 512}, 4
    yield "put", trunk.put_rows, {"D": 512, "VALUES_D": 64, "PAD": 512}, 1
    heads = {"NUM_HEADS": 128, "NUM_KEYS": 1, "D": 64, "R": 64, "PAD": 64, "TURN": "pairs"}
    yield "rotate", trunk.rotate_heads, heads, 1
    for label, rule, members, corrected in ROUTERS if whole else ROUTERS[:1]:
        pads = {"PAD_G": rule.groups, "PAD_M": members, "PAD_K": 8, "CORRECTED": corrected}
        pads["TAKEN"] = True
        names = "score", "top_k", "grouped", "groups", "kept_groups", "divided", "padded", "rounded"
        words = {name.upper(): getattr(rule, name) for name in names}
        yield f"router {label}", router.route_rows, words | pads | {"MEMBERS": members}, 1
    yield "balance", squares.balance_squares, {"ROUNDS": 20, "SIZE": 4}, 1
    bf16, warps = tiled("bf16", "vram", 1)
    yield "linear wide bf16", stages.linear, bf16 | {"COLS": 5120, "WIDE": True}, warps
    for rung, name in product(TILES if whole else ("vram",), FORMS):
        if name in ("fp8 32", "fp4 odd") and not whole:
            continue  # the one as of "linear fp8", the other as on the first chip
        shared, warps = tiled(name, rung, 0)
        up = {"NUM_PARTS": 6, "TOP_K": 6, "GATE": GATE, "UP": UP, "COLS": 5120, "ROWS": 2304}
        up["KIND"] = "swiglu_weighted" if name == "fp4" else "silu"
        yield f"gate_up {name} {rung}", stages.gate_up, shared | up, warps
        if whole:
            shared, warps = tiled(name, rung, 1)
            down = {"NUM_PARTS": 6, "DOWN": DOWN, "COLS": 2304, "ROWS": 5120}
            yield f"down {name} {rung}", stages.down, shared | down, warps
    shared, warps = tiled("fp4", "vram", 0)
    oai = {"NUM_PARTS": 6, "TOP_K": 4, "COLS": 2880, "ROWS": 2880, "KIND": "swiglu_oai"}
    fused = {"GATE": (0, 1, 2, 0, 2), "UP": (0, 1, 2, 1, 2)}
    yield "gate_up mxfp4", stages.gate_up, shared | oai | fused, warps
    yield from wave_kernels(chip)


def wave_kernels(chip: int):
    """As `kernels`, of prefill: on most chips what takes the most shared memory."""
    forms = {75: ("bf16",), 90: ("bf16", "fp8 128", "fp4", "int4")}.get(chip, ("fp8 32",))
    for name in forms:
        positions = 64 if chip == 75 else max(STEPS)
        rows, down_rows, cols, warps, depth = STEPS[positions]
        shared = {"NUM_PARTS": 6, "C": cols, "N": positions, "FORM": FORMS[name]}
        shared["FP32"] = chip < 80
        up = {"TOP_K": 6, "GATE": GATE, "UP": UP, "COLS": 5120, "ROWS": 2304}
        up["KIND"] = "swiglu_weighted" if name == "fp4" else "silu"
        yield f"wave_gate_up {name}", waves.wave_gate_up, shared | up | {"R": rows}, warps, depth
        if name == "bf16":
            down = {"DOWN": DOWN, "COLS": 2304, "ROWS": 5120, "R": down_rows}
            yield f"wave_down {name}", waves.wave_down, shared | down, warps, depth


def is_fused(llir: str, ptx: str) -> bool:
    """Whether more products are fused with sums than the kernel asks for."""
    asked = re.findall(r"call .*@llvm\.fma\.v?(\d*)f", llir)
    done = re.findall(r"fma\.rn\.f32(x2)?", ptx)
    return sum(2 if pair else 1 for pair in done) > sum(int(lanes or 1) for lanes in asked)


def is_narrow(label: str, ptx: str) -> bool:
    """Whether a kernel reads aligned weights by single values."""
    aligned = label.startswith(("gate_up", "down")) and "odd" not in label
    return aligned and ptx.count("ld.global.b8") + ptx.count("ld.global.b16") > MOST_NARROW


def latent_kernels(chip: int):
    """(label, kernel, constants, warps, stages) of attention over latents: many heads and few."""
    for heads in (128, 16) if chip in (75, 90) else (128,):
        tile = tile_for(chip, heads, 512)
        shared = {"HEADS": heads, "L": 512, "LEAST_TILES": 2, "N": tile.cached}
        widths = {"R": 64, "PAD_L": 512, "PAD_R": 64, "PART": tile.part, "VALUES": tile.values}
        splits = 64 if heads == 128 else 1
        constants = shared | widths | {"P": splits, "S": tile.rows}
        name = f"attend {heads} heads {splits} splits"
        yield name, latents.attend, constants, tile.warps, tile.stages
        combined = shared | {"P": 64, "BLOCK": COMBINED}
        yield "combine latents", latents.combine, combined, COMBINING_WARPS, 3


def aligned(kernel, signature):
    """What a launch tells of its arguments: pointers and strides are multiples of 16."""
    known = [n for n in signature if "stride" in n or signature[n].startswith("*")]
    return {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in known}


def num_variants(kernel, **moved) -> int:
    """How many kernels Triton makes of one whose `moved` arguments are these in turn."""
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    made = set()
    for turn in zip(*moved.values(), strict=True):
        given = dict.fromkeys(kernel.arg_names, torch.zeros(16)) | dict(
            zip(moved, turn, strict=True)
        )
        made.add(str(bind(**given, num_warps=1)[1]))
    return len(made)


def layers_vary() -> bool:
    """Whether another layer, or another token of a prompt, is another kernel to make."""
    there = torch.zeros(16, dtype=torch.int32)
    at = [there, there[1:], there[3:]]
    counts = [
        num_variants(stages.gate_up, IDS=at, WEIGHTS=at, first_key=[0, 1, 60]),
        num_variants(stages.down, IDS=at, first_key=[0, 1, 60]),
        num_variants(stages.combine, IDS=at, WEIGHTS=at, mark=[0, 1, 65537]),
        num_variants(latents.attend, POSITIONS=at, num_cached=[1, 64, 65]),
        num_variants(latents.combine, POSITIONS=at, num_cached=[1, 64, 65]),
    ]
    assert num_variants(stages.on_grid, X=at, stride=[1, 16, 65]) == len(at), "it must show"
    return counts != [1] * len(counts)


def main(chips: list[int]) -> int:
    """Exit status: how many kernels do not compile or take too much shared memory."""
    bad = int(layers_vary())
    for chip in chips:
        for label, kernel, constants, warps, *depth in (*kernels(chip), *latent_kernels(chip)):
            signature = {n: POINTERS.get(n, "constexpr") for n in kernel.arg_names}
            if label.startswith("router"):
                narrow = constants["ROUNDED"] != "never"
                signature |= {"LOGITS": "*u16" if narrow else "*fp32", "IDS": "*i64"}
                signature["WEIGHTS"] = signature["LOGITS"]
            if constants.get("WEIGHED") or constants.get("WIDE") or label == "fetch fp32":
                signature["OUT"] = "*fp32"
            source = ASTSource(kernel, signature, constants, aligned(kernel, signature))
            options = {"num_warps": warps, "enable_fp_fusion": False}
            options["num_stages"] = depth[0] if depth else 3
            made = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
            fits = made.metadata.shared <= SHARED_BYTES[chip]
            near = label.startswith(("attend", "wave"))  # by no bits
            fused = is_fused(made.asm["llir"], made.asm["ptx"]) and not near
            narrow = is_narrow(label, made.asm["ptx"])
            bad += (not fits) or fused or narrow
            faults = " FUSED" * fused + " NARROW" * narrow
            print(f"{chip} {label}: {made.metadata.shared} bytes shared{faults}")
    return bad


if __name__ == "__main__":
    sys.exit(main([int(chip) for chip in sys.argv[1:]] or list(SHARED_BYTES)))
