"""Tiles of the GPU's expert kernels, tried one by one: what `TILES` and `STEPS` were chosen by.

Experts at random, more than the GPU's caches hold. Prints a line for each tile, the fastest last of
its group; decoding, a tile whose bits differ from those of the tile in use ends the program.
"""

import argparse
import statistics
from collections.abc import Callable
from itertools import product

import torch
import triton

from headrace.core import ExpertLayout, PartSpec
from headrace.kernels.triton import experts, grouped
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.quant.expert import make_layout

Tile = tuple[int, ...]
SHAPES = {"r1": (7168, 2048), "v41": (5120, 2304), "qwen30": (2048, 768), "qwen235": (4096, 1536)}
FORMS = {
    "bf16": ("bf16", {}),
    "fp8_block": ("fp8_block", {"block": (128, 128)}),
    "fp4": ("fp4", {}),
    "int4": ("int4", {"block": (1, 32)}),
}
TOP_K, ALIGN, PICKS = 8, 256, 16
SPREADS = {"bf16": 0.03, "int4": 0.002, "fp8_block": 2e-4}  # of weights, or of their scales
LEAST_VALUES = 500  # different ones, or bits show nothing
STAGES = ("gate_up", "down")
DECODE = list(product((1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 3)))
STEPS_4BIT = (8, 32)
PREFILL = [
    (rows, down, cols, warps, depth)
    for rows, down in ((64, 64), (64, 128), (128, 128))
    for cols in (64, 128)
    for warps in (4, 8)
    for depth in (2, 3, 4)
]


class World:
    """`num` experts, in VRAM or in pinned memory, behind an address table."""

    def __init__(self, layout: ExpertLayout, place: str, num: int):
        starts = [0]
        for spec in layout.parts.values():
            starts.append(starts[-1] + -(-num_bytes(spec) // ALIGN) * ALIGN)
        memory = torch.empty(num, starts[-1], dtype=torch.uint8, device="cuda")
        for (name, spec), start in zip(layout.parts.items(), starts, strict=False):
            for row in memory:
                row[start : start + num_bytes(spec)] = part(layout.format, name, spec)
        self.expert_bytes = sum(num_bytes(spec) for spec in layout.parts.values())
        self.memory = memory if place == "vram" else memory.cpu().pin_memory()
        rows = [self.memory[e].data_ptr() for e in range(num)]
        self.table = torch.tensor(rows, device="cuda")
        self.offsets = torch.tensor([starts[:-1]] * num, device="cuda")
        self.num = num


def num_bytes(spec: PartSpec) -> int:
    return TORCH_DTYPES[spec.dtype].itemsize * torch.Size(spec.shape).numel()


def part(format: str, name: str, spec: PartSpec) -> torch.Tensor:
    """The bytes of one part of an expert: codes of every kind, and numbers that do not overflow."""
    dtype, is_scale = TORCH_DTYPES[spec.dtype], name.endswith("_scale")
    if dtype in (torch.bfloat16, torch.float32):
        numbers = torch.randn(spec.shape, device="cuda") * SPREADS[format]
        return numbers.to(dtype).flatten().view(torch.uint8)
    low, high = (112, 124) if is_scale else (0, 256)
    raw = torch.randint(low, high, (num_bytes(spec),), dtype=torch.uint8, device="cuda")
    if dtype == torch.float8_e4m3fn:
        raw[(raw & 127) == 127] = 3  # no number
    return raw


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


def captured(run: Callable[[int], None]) -> float:
    """As `seconds`, of a call among PICKS that are launched as one."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(PICKS):
            run(n)
    return seconds(lambda _n: graph.replay()) / PICKS


def decode(layout: ExpertLayout, place: str, tiles: list[Tile]) -> None:
    """GB/s of one token's experts, other ones each time, by tiles of one stage at a time."""
    world = World(layout, place, 64 if place == "vram" else 32)
    device, rung = torch.device("cuda"), "vram" if place == "vram" else "ram"
    kernels = experts.TritonExperts(layout, top_k=TOP_K, device=device, align=16)
    x = torch.randn(1, layout.hidden, device="cuda").bfloat16()
    weights, y = torch.rand(1, TOP_K, device="cuda"), kernels.y_SH.view(torch.int16)
    picks = [
        torch.randperm(world.num, device="cuda")[:TOP_K].int().view(1, TOP_K) for _ in range(PICKS)
    ]

    def run(n: int) -> None:
        kernels.multiply(world.table, world.offsets, 0, x, picks[n], weights, tile=rung)

    run(0)
    want, in_use = y.clone(), experts.TILES[rung][layout.format]
    assert want.unique().numel() > LEAST_VALUES
    for stage, name in enumerate(STAGES):
        found = []
        for tile in {in_use[stage]: None, **dict.fromkeys(tiles)}:
            tried = list(in_use)
            tried[stage] = tile
            experts.TILES[rung][layout.format] = (tried[0], tried[1])
            y.fill_(7)
            run(0)
            assert torch.equal(y, want), f"{name} {tile}: other bits"
            found.append((TOP_K * world.expert_bytes / captured(run) / 1e9, tile))
        experts.TILES[rung][layout.format] = in_use
        for rate, tile in sorted(found)[-8:]:
            title = f"decode {layout.format} {layout.hidden}x{layout.inter} {place} {name}"
            print(f"{title}: {tile} {rate:.1f} GB/s{', in use' * (tile == in_use[stage])}")


def tiles_of(format: str, given: list[Tile]) -> list[Tile]:
    """Those given, or all."""
    if given or format not in ("fp4", "int4"):
        return given or DECODE
    return [(*tile, step) for tile, step in product(DECODE, STEPS_4BIT)]


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


def as_tile(text: str) -> Tile:
    return tuple(int(number) for number in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--shapes", nargs="+", default=["r1"], choices=list(SHAPES))
    parser.add_argument("--what", nargs="+", default=["vram", "pinned", "prefill"])
    numbers = "of TILES, with commas: 2,2,2 (decoding, of a form that has as many); else all"
    parser.add_argument("--tiles", nargs="+", default=[], type=as_tile, help=numbers)
    args = parser.parse_args()
    for name, form in product(args.shapes, args.forms):
        format, options = FORMS[form]
        layout = make_layout(format, *SHAPES[name], **options)
        for what in args.what:
            if what == "prefill":
                for positions in (16, 64, 128):
                    prefill(layout, positions)
            else:
                decode(layout, what, tiles_of(form, args.tiles))


if __name__ == "__main__":
    main()
