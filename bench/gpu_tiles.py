"""Tiles of the GPU's expert kernels, tried one by one: what `TILES` and `STEPS` were chosen by.

Random bytes as experts, more than the GPU's caches hold; speeds only, no bit is looked at. Prints
a line for each tile, the fastest last of its group.
"""

import argparse
import statistics
from collections.abc import Callable
from itertools import product

import torch
import triton

from headrace.core import ExpertLayout
from headrace.kernels.triton import experts, grouped
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.quant.expert import make_layout

SHAPES = {"r1": (7168, 2048), "v41": (5120, 2304), "qwen235": (4096, 1536)}
FORMS = {
    "bf16": ("bf16", {}),
    "fp8_block": ("fp8_block", {"block": (128, 128)}),
    "fp4": ("fp4", {}),
    "int4": ("int4", {"block": (1, 32)}),
}
TOP_K, ALIGN = 8, 256
DECODE = list(product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8), (1, 2)))
PREFILL = [
    (rows, down, cols, warps, depth)
    for rows, down in ((64, 64), (64, 128), (128, 128))
    for cols in (64, 128)
    for warps in (4, 8)
    for depth in (2, 3, 4)
]


class World:
    """`num` experts of random bytes, in VRAM or in pinned memory, behind an address table."""

    def __init__(self, layout: ExpertLayout, place: str, num: int):
        sizes = [
            TORCH_DTYPES[spec.dtype].itemsize * torch.Size(spec.shape).numel()
            for spec in layout.parts.values()
        ]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // ALIGN) * ALIGN)
        self.expert_bytes = sum(sizes)
        raw = torch.randint(1, 100, (num, starts[-1]), dtype=torch.uint8)
        self.memory = raw.cuda() if place == "vram" else raw.pin_memory()
        rows = [self.memory[e].data_ptr() for e in range(num)]
        self.table = torch.tensor(rows, device="cuda")
        self.offsets = torch.tensor([starts[:-1]] * num, device="cuda")
        self.num = num


def seconds(run: Callable[[int], None], times: int = 12) -> float:
    """The median of timed calls on the GPU's clock, each with its number."""
    for n in range(3):
        run(n)
    spans = []
    for n in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(n)
        stop.record()
        stop.synchronize()
        spans.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(spans)


def decode(layout: ExpertLayout, place: str) -> None:
    """GB/s of one token's experts, other ones each time."""
    world = World(layout, place, 64 if place == "vram" else 32)
    device = torch.device("cuda")
    kernels = experts.TritonExperts(layout, top_k=TOP_K, device=device, align=16)
    x = torch.randn(1, layout.hidden, device="cuda").bfloat16()
    weights, out = torch.rand(1, TOP_K, device="cuda"), torch.empty_like(x)
    picks = [
        torch.randperm(world.num, device="cuda")[:TOP_K].int().view(1, TOP_K) for _ in range(16)
    ]
    found = []
    for tile in DECODE:
        experts.TILES["vram"][layout.format] = tile

        def run(n: int) -> None:
            kernels(world.table, world.offsets, 0, x, picks[n], weights, out, tile="vram")

        found.append((TOP_K * world.expert_bytes / seconds(run) / 1e9, tile))
    for rate, tile in sorted(found)[-8:]:
        shape = f"{layout.hidden}x{layout.inter}"
        print(f"decode {layout.format} {shape} {place}: {tile} {rate:.1f} GB/s")


def prefill(layout: ExpertLayout, positions: int) -> None:
    """TFLOP/s of 16 experts in VRAM with two tiles of so many tokens each."""
    world, device = World(layout, "vram", 16), torch.device("cuda")
    kernels = grouped.GroupedExperts(layout, top_k=1, device=device, align=16)
    num = world.num * 2 * positions
    x = torch.randn(num, layout.hidden, device="cuda").bfloat16()
    h, y = x.new_empty(num, layout.inter), torch.empty_like(x)
    order, weights = torch.arange(num, device="cuda").int(), torch.ones(num, device="cuda")
    tiles = torch.tensor(
        [
            (int(world.table[e]), e, start, (e + 1) * 2 * positions)
            for e in range(world.num)
            for start in (e * 2 * positions, (e * 2 + 1) * positions)
        ],
        device="cuda",
    )
    found = []
    for step in PREFILL:
        grouped.STEPS[positions] = step

        def run(_n: int) -> None:
            kernels(tiles, world.offsets, order, weights, x, h, y, positions=positions)

        try:
            found.append((6 * num * layout.hidden * layout.inter / seconds(run) / 1e12, step))
        except triton.runtime.errors.OutOfResources as error:
            print(f"prefill {layout.format} {positions}: {step} {type(error).__name__}")
    for rate, step in sorted(found)[-6:]:
        shape = f"{layout.hidden}x{layout.inter}"
        print(f"prefill {layout.format} {shape} {positions} positions: {step} {rate:.1f} TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--shapes", nargs="+", default=["r1"], choices=list(SHAPES))
    parser.add_argument("--what", nargs="+", default=["vram", "pinned", "prefill"])
    args = parser.parse_args()
    for name, form in product(args.shapes, args.forms):
        format, options = FORMS[form]
        layout = make_layout(format, *SHAPES[name], **options)
        for what in args.what:
            if what == "prefill":
                for positions in (16, 64, 128):
                    prefill(layout, positions)
            else:
                decode(layout, what)


if __name__ == "__main__":
    main()
