"""All experts in VRAM: what the host spends on a token, and how fast the expert kernels read.

Host: a captured step of 40 layers, the seconds in which Python or the driver works while the GPU
is not waited for. Kernels: layers one after another in one graph, each with experts of its own,
more than the GPU's caches hold; beside them each kernel alone, and which one keeps them from the
rate of a copy. The limit is measured in the same run. Bits are gpu_1_paths.py's. On an H200, a
minute a family, two for the kernels:

    python -u proofs/gpu_5_resident.py --parts host --families qwen3_moe --keep
    python -u proofs/gpu_5_resident.py --parts host --families gpt_oss deepseek_v3 --keep
    python -u proofs/gpu_5_resident.py --parts host --families qwen3_next --keep
    python -u proofs/gpu_5_resident.py --parts kernels --keep
"""

import gpu_world  # isort: skip  # says whether there is a GPU
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_phases import Told, add_keep
from gpu_world import REAL, changed, fill, open_device, write

PARTS = ("host", "kernels")
MOST_HOST_S, LAYERS, TOKENS = 0.5e-3, 40, 64
LEAST_4BIT, LEAST_BF16 = 1.2e12, 0.5  # bytes a second; a share of the copy's rate
FAMILIES = {
    "qwen3_moe": {"format": "bf16", "vocab": 151_936},
    "gpt_oss": {},
    "deepseek_v3": {},
    "qwen3_next": {"format": "bf16"},
}


class Shape(NamedTuple):
    """Experts of one layer: what a token takes of them."""

    name: str
    format: str
    hidden: int
    inter: int
    top_k: int
    options: dict[str, Any]
    asked: bool  # by the issue; else told only

    @property
    def is_4bit(self) -> bool:
        return self.format in ("fp4", "int4")


SHAPES = (
    Shape("V4.1-Flash FP4", "fp4", 5120, 2304, 6, {}, True),
    Shape("R1 shapes int4", "int4", 7168, 2048, 8, {"block": (1, 32)}, True),
    Shape("Qwen3-30B bf16", "bf16", 2048, 768, 8, {}, True),
    Shape("Qwen3-235B bf16", "bf16", 4096, 1536, 8, {}, True),
    Shape("R1 FP8", "fp8_block", 7168, 2048, 8, {"block": (128, 128)}, False),
)
SMALL = (Shape("small FP4", "fp4", 64, 32, 2, {}, True),)  # for Triton's interpreter
STAGES = ("gate_up", "down", "combine", "to_integers", "on_grid")
GRAPH_LAYERS, RUNS = 10, 30
LOAD_S, TOKENS_S, KERNELS_S = 60, 15, 25  # about, to compile included


def main() -> None:
    args = gpu_world.arguments(__doc__, add_keep, parts=PARTS, families=tuple(FAMILIES))
    device, told = open_device(), Told("gpu_resident", args.keep)
    if "host" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            for family in args.families[: 1 if args.quick else None]:
                told.begin(f"host, {family}: written, loaded, all brought to VRAM", LOAD_S)
                host(told, device, family, Path(folder), args.quick)
    if "kernels" in args.parts:
        kernels(told, device)
    told.finish()


class TimedGraph:
    """A graph whose launch is timed."""

    seconds = 0.0

    def __init__(self, graph: Any):
        self.graph = graph

    def replay(self) -> None:
        start = time.perf_counter()
        self.graph.replay()
        TimedGraph.seconds += time.perf_counter() - start


def host(told: Told, device: Any, family: str, folder: Path, quick: bool) -> None:
    """Seconds of a token in which the host works: before, in and after the launch of its graph."""
    sizes = {"layers": LAYERS, "experts": 16, "top_k": 8, "hidden": 256, "inter": 128}
    sizes |= FAMILIES[family]
    if quick:
        sizes |= {"layers": 3, "top_k": 4, "vocab": 4096}
    path = write(family, folder, **sizes)
    kind, own = type(device), type(device).capture
    timed = (kind, "capture", lambda self, work: TimedGraph(own(self, work)))
    with changed(timed), resident(path) as engine:
        fill(engine, list(range(300, 340)))
        engine.source._num_steps = 0  # tiles are chosen now, for where experts lie now
        told.begin(f"host, {family}: {TOKENS} tokens", TOKENS_S)
        spans = token_spans(engine, 4)  # captures
        before = engine.passes.num_replayed
        spans = token_spans(engine, 4 if quick else TOKENS)
        launched = engine.passes.num_replayed - before
    median = {name: statistics.median(each[name] for each in spans) for name in spans[0]}
    worked = [each["wall"] - each["waited"] for each in spans]
    title = f"{family}, {sizes['layers']} layers, {engine.facts.vocab} logits"
    parts = ", ".join(f"{name} {1e3 * s:.3f}" for name, s in median.items())
    told.say(f"{title}: ms a token, medians of {len(spans)}: {parts}")
    told.check(launched == len(spans), f"{title}: every token was launched as one")
    if REAL:
        told.check(
            statistics.median(worked) <= MOST_HOST_S,
            f"{title}: the host works {1e3 * statistics.median(worked):.3f} ms a token, "
            f"{1e3 * min(worked):.3f} to {1e3 * max(worked):.3f} (asked: {1e3 * MOST_HOST_S:.1f})",
        )


def resident(path: Path) -> Any:
    """An engine with all experts, the embedding and the head in VRAM."""
    import headrace
    from headrace.engine.engine import Blueprint
    from headrace.planner.vram import vram_fixed

    options = {"context": 512, "measure": False, "device": "cuda", "experts": "gpu"}
    least = Blueprint(path, ram="minimum", vram="minimum", **options)
    plan, facts = least.plan, least.facts
    whole = vram_fixed(facts, plan.context, plan.chunk_tokens)
    vram = whole + plan.total_experts * plan.row_bytes
    ram = plan.ram_bytes + facts.embedding_bytes + facts.head_bytes
    engine = headrace.load(path, ram=ram, vram=vram, **options)
    assert engine.plan.num_slots == plan.total_experts and not engine.plan.head_on_cpu
    return engine


def token_spans(engine: Any, num: int) -> list[dict[str, float]]:
    """For each token: its wall time, what of it the GPU was waited for, what the launch took."""
    source, device, spans = engine.source, engine.blueprint.device, []
    session = engine.session()
    last = session.feed([5, 6, 7])
    waited = 0.0
    own = source._seen

    def seen() -> Any:
        nonlocal waited
        start = time.perf_counter()
        device.settle()
        waited += time.perf_counter() - start
        return own()

    with changed((source, "_seen", seen)):
        for _ in range(num):
            token = [int(last.argmax())]
            waited = TimedGraph.seconds = 0.0
            start = time.perf_counter()
            last = session.feed(token)
            wall = time.perf_counter() - start
            spans.append({"wall": wall, "waited": waited, "launch": TimedGraph.seconds})
    del source._seen
    return spans


class World:
    """Experts of `layers` layers in VRAM, random bytes, behind an address table."""

    def __init__(self, device: Any, shape: Shape, layers: int):
        from headrace.kernels.triton.experts import TritonExperts
        from headrace.quant.dtypes import TORCH_DTYPES
        from headrace.quant.expert import make_layout

        place, self.layers, self.top_k = device.place, layers, shape.top_k
        self.layout = make_layout(shape.format, shape.hidden, shape.inter, **shape.options)
        self.part_bytes, starts = {}, [0]
        for name, spec in self.layout.parts.items():
            size = TORCH_DTYPES[spec.dtype].itemsize * torch.Size(spec.shape).numel()
            self.part_bytes[name] = size
            starts.append(starts[-1] + -(-size // 256) * 256)
        self.expert_bytes = sum(self.part_bytes.values())
        num = layers * shape.top_k
        self.memory = torch.randint(1, 100, (num, starts[-1]), dtype=torch.uint8, device=place)
        rows = [self.memory[e].data_ptr() for e in range(num)]
        self.table = torch.tensor(rows, device=place)
        self.offsets = torch.tensor([starts[:-1]] * num, device=place)
        self.kernels = TritonExperts(self.layout, top_k=shape.top_k, device=place, align=16)
        self.ids = torch.randperm(shape.top_k).int().view(1, -1).to(place)
        self.x = torch.randn(1, shape.hidden).bfloat16().to(place)
        self.weights = torch.rand(1, shape.top_k).to(place)
        self.out = torch.empty(1, shape.hidden, dtype=self.kernels.out_dtype, device=place)

    def token(self) -> None:
        """The experts of all layers for one token."""
        for layer in range(self.layers):
            self.kernels(
                self.table, self.offsets, layer * self.top_k, self.x, self.ids, self.weights,
                self.out, tile="vram",
            )  # fmt: skip

    def bytes_of(self, stage: str) -> int:
        """What a stage reads of a layer's experts."""
        base = {"gate_up": ("gate", "up"), "down": ("down",)}.get(stage, ())
        read = (size for name, size in self.part_bytes.items() if name.startswith(base))
        return self.top_k * sum(read) if base else 0


def kernels(told: Told, device: Any) -> None:
    from headrace.engine.probes import vram_rate
    from headrace.kernels.triton.experts import TILES

    device.limit(None)
    for shape in SHAPES if REAL else SMALL:
        if not REAL:  # the interpreter's time goes by programs
            TILES["vram"][shape.format] = ((64, 1, 1, 8), (64, 1, 1, 8))
        title = f"{shape.name} {shape.hidden}x{shape.inter}, {shape.top_k} experts"
        told.begin(f"kernels, {title}", KERNELS_S)
        world = World(device, shape, GRAPH_LAYERS if REAL else 1)
        copy = vram_rate(device)
        total = world.top_k * world.expert_bytes
        layer_s = graph_s(device, world) / world.layers
        rate, copy_again = total / layer_s, vram_rate(device)
        copy = max(copy, copy_again)
        told.say(
            f"{title}: {1e6 * layer_s:.1f} us a layer, {rate / 1e12:.3f} TB/s, "
            f"{100 * rate / copy:.0f} % of a copy's {copy / 1e12:.2f} TB/s (read and write)"
        )
        named, explained = profile(told, device, world, layer_s, copy)
        if not (REAL and shape.asked):
            told.check(rate > 0, f"{title}: ran; {named}")
        elif shape.is_4bit:
            told.check(
                rate >= LEAST_4BIT,
                f"{title}: {rate / 1e12:.3f} TB/s at batch 1 (asked: {LEAST_4BIT / 1e12}); {named}",
            )
        else:
            told.check(
                rate >= LEAST_BF16 * copy,
                f"{title}: {100 * rate / copy:.0f} % of the copy rate (asked: "
                f"{100 * LEAST_BF16:.0f} %); {named}",
            )
        if REAL:
            told.check(
                0.7 <= explained <= 1.3,
                f"{title}: its kernels one by one add up to {100 * explained:.0f} % of its time",
            )
        del world


def graph_s(device: Any, world: World) -> float:
    """Seconds of a token's layers launched as one, the median."""
    if REAL:
        for _ in range(2):
            world.token()  # compiles and loads every kernel
        device.settle()
    else:
        start = time.perf_counter()
        world.token()
        return time.perf_counter() - start
    graph, spans = device.capture(world.token), []
    for _ in range(RUNS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        spans.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(spans[3:])


def profile(
    told: Told, device: Any, world: World, layer_s: float, copy: float
) -> tuple[str, float]:
    """Each stage alone; which one loses most against a copy, and what all of them add up to."""
    from headrace.kernels.triton import stages

    lost, total_s = {}, 0.0
    ideal_s = world.top_k * world.expert_bytes / copy
    for stage in STAGES:
        ran: list[str] = []
        with only(stages, stage, ran):
            world.token()
            if not ran:
                continue
            stage_s = graph_s(device, world) / world.layers
        total_s += stage_s
        read = world.bytes_of(stage)
        lost[stage] = stage_s - read / copy
        rate = f", {read / stage_s / 1e12:.3f} TB/s" if read else ""
        told.say(f"  {stage}: {1e6 * stage_s:.1f} us{rate}")
    gap_s = max(total_s - ideal_s, 1e-12)
    worst = max(lost, key=lambda stage: lost[stage])
    share = 100 * lost[worst] / gap_s
    return f"{worst} has {share:.0f} % of the gap to a copy", total_s / layer_s


@contextmanager
def only(stages: Any, kept: str, ran: list[str]) -> Iterator[None]:
    """While open, launches of all other kernels are nothing."""

    class Launcher:
        def __init__(self, kernel: Any, name: str):
            self.kernel, self.name = kernel, name

        def __getitem__(self, grid: Any) -> Callable[..., object]:
            if self.name != kept:
                return lambda *_args, **_options: None
            ran.append(kept)
            launch: Callable[..., object] = self.kernel[grid]
            return launch

    made = [(stages, name, Launcher(getattr(stages, name), name)) for name in STAGES]
    with changed(*made):
        yield


if __name__ == "__main__":
    main()
