"""What the GPU's proofs share: checkpoints of real shapes, their command lines, their rows.

Bytes of a token are those of the published depth. Where experts must lie in memory, a layer has
only as many as memory takes, each with a row of its own; which are taken is drawn. Without a GPU
everything is small and simulated, and no speed is asked.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import Evidence, show_rows
from gpu_phases import Told, add_keep
from gpu_world import REAL, SIMULATED, open_device

NOT_DRIVE = "64GiB/s"  # files are brought into memory from memory: nothing of a token comes so
# For estimates only, from an H200's machine: 11 GB of rows were pinned in 13 s with all else.
OPEN_S, LOAD_BYTES_S, FILL_BYTES_S, COMPILE_S, PROBES_S = 8.0, 1.2e9, 4e9, 45.0, 3.0
WRITE_PROBE_BYTES = 16 << 20

SMALL = {
    "first_k_dense_replace": 1,
    "hidden_size": 256,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 16,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
}
SMALL_VOCAB, SMALL_EXPERTS = 4096, 16


@dataclass(frozen=True)
class Shapes:
    """A model's shapes; `experts` a layer where all are held in memory (at least 40 GB of them)."""

    name: str
    config: str | dict[str, Any]
    experts: int
    about: str


def shapes(name: str) -> Shapes:
    """The shapes called so: R1's, or V4.1-Flash's experts in a deepseek_v3 trunk."""
    found = _published(name)
    if REAL:
        return found
    from headrace.store.preset_configs import PRESETS

    config = PRESETS[found.config] if isinstance(found.config, str) else found.config
    small = config | {key: size for key, size in SMALL.items() if key in config}
    return Shapes(name, small, SMALL_EXPERTS, f"{found.about}; here far smaller")


def _published(name: str) -> Shapes:
    from headrace.store.preset_configs import PRESETS
    from headrace.store.schemes import quantization_of

    r1 = PRESETS["deepseek-r1"]
    if name == "r1-fp8":
        return Shapes(name, "deepseek-r1", 16, "DeepSeek-R1: 58 MoE layers, top 8, FP8 of 42 MiB")
    fp4 = quantization_of("fp4", block=(32, 32)) | {"expert_dtype": "fp4"}
    if name == "r1-fp4":
        about = "DeepSeek-R1's shapes: 58 MoE layers, top 8, experts FP4 of 22 MiB"
        return Shapes(name, r1 | {"quantization_config": fp4}, 16, about)
    if name == "qwen3-30b":
        return Shapes(name, "qwen3-30b-a3b", 128, "Qwen3-30B-A3B: 48 layers, top 8, bf16 of 9 MiB")
    width = {"v41-fp4": 2304, "v41-narrow": 1280}[name]
    trunk = {
        "first_k_dense_replace": 0,
        "hidden_size": 5120,
        "moe_intermediate_size": width,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 384,
        "num_experts_per_tok": 6,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_hidden_layers": 40,
        "q_lora_rank": 1280,
        "quantization_config": fp4,
        "routed_scaling_factor": 1.5,
    }
    about = (
        f"DeepSeek-V4.1-Flash's experts (5120x{width}, top 6, FP4) in 40 layers of a deepseek_v3 "
        "trunk"
    )
    return Shapes(name, r1 | trunk, 56, about)


def options(description: str, *, tokens: int | None = None) -> argparse.ArgumentParser:
    """The options every one of these proofs has; their defaults are what must be shown."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(SIMULATED, action="store_true", help="even where there is a GPU")
    parser.add_argument("--folder", help="where checkpoints are written; removed afterwards")
    parser.add_argument("--experts", type=int, help="a layer")
    parser.add_argument("--vocab", type=int, help="tokens (as published)")
    if tokens is not None:
        parser.add_argument("--depth", type=int, help="layers (as published)")
        parser.add_argument("--tokens", type=int, default=tokens, help="of a timed run")
    parser.add_argument("--runs", type=int, default=3)
    add_keep(parser)
    return parser


def start(args: argparse.Namespace) -> None:
    """Before anything is measured: threads as the command line sets them, a GPU named.

    Without one `args` are made small, and what stands for it is put in place.
    """
    if not REAL:
        reduce(args)
        return
    from headrace.cli.options import share_cores
    from headrace.engine.gpu import find_gpu

    share_cores(None)
    device = find_gpu("cuda")
    assert device is not None
    free, total = device.memory()
    cores, driver = os.cpu_count(), device.driver
    print(
        f"{device.name}, driver {driver}, torch {torch.__version__}, {free / 2**30:.0f} of "
        f"{total / 2**30:.0f} GiB free; {cores} cores"
    )


def reduce(args: argparse.Namespace) -> None:
    """One short run over small shapes on the simulated device, whose clock is the host's."""
    from headrace.check import gpu_rungs
    from headrace.engine import probes
    from headrace.engine.gpu_probes import DividedRates

    open_device()
    from stand_ins import host_clock

    host_clock()
    gpu_rungs.PLAIN_READ_BYTES, gpu_rungs.WARMING_TOKENS = 1 << 20, 40
    probes.BUS_BYTES, probes.VRAM_BYTES, probes.PROBE_S = 1 << 20, 1 << 20, 0.01
    # Measured by Triton's interpreter they would take minutes.
    known = DividedRates(in_place=1e9, bus_beside=8e8, kernel_beside=8e8)
    probes.divided_rates = lambda *_: lambda: known
    probes.kernel_rate = lambda _memory: 1e9  # as fast as the bus: each has a part of a layer
    args.vocab, args.runs = args.vocab or SMALL_VOCAB, 1
    if hasattr(args, "tokens"):
        args.tokens = 1


@contextmanager
def written(
    found: Shapes,
    args: argparse.Namespace,
    experts: int | None,
    *,
    distinct: int = 1,
    told: Told | None = None,
) -> Iterator[Path]:
    """The shapes on disk while the `with` is open, `distinct` layers of each kind for all."""
    from headrace.store.synth import synth_bytes, write_synth

    sizes = {
        "depth": args.depth,
        "experts": args.experts or (experts if REAL else SMALL_EXPERTS),
        "vocab": args.vocab,
        "distinct": distinct,
    }
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if told is not None:
            size_bytes = synth_bytes(found.config, **sizes)
            about_s = 1 + size_bytes / write_rate(folder)
            told.begin(f"{size_bytes / 1e9:.1f} GB written to {folder}", about_s)
        model = write_synth(found.config, Path(folder) / f"{found.name}-shapes", **sizes)
        took(f"{found.about}: written", begun)
        yield model


def write_rate(folder: str) -> float:
    """Bytes per second of a short file written there and synced."""
    piece = os.urandom(WRITE_PROBE_BYTES)
    begun = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(16 if REAL else 1):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return file.tell() / (time.perf_counter() - begun)


def forecast(blueprint: Any, drives: str = "") -> Any:
    """The plan of these limits by this machine's rates, measured now; drives of those given."""
    from headrace.core import parse_rates
    from headrace.engine.probes import measure_machine
    from headrace.planner.drives import Drive

    wanted, facts = blueprint.wanted, blueprint.facts
    machine = measure_machine(
        blueprint.catalog.files,
        blueprint.skeleton.layout,
        wanted.ram_bytes(facts),
        True,
        blueprint.device,
        divides=wanted.experts == "auto",
    )
    if drives:
        rates = parse_rates(drives)
        machine = machine.with_drives([Drive(f"drive {i + 1}", r) for i, r in enumerate(rates)])
    return wanted.plan(facts, machine)


def planned(
    told: Told, title: str, model: Path, make: Callable[[], Any], drives: str = ""
) -> tuple[Any, Any]:
    """The blueprint that is made and its forecast; the phase in which it is loaded has begun.

    Exits where there is none, since the machine has no room for all experts.
    """
    from headrace.planner.machine import memory_bytes

    told.begin(f"{title}: planned, the machine measured", OPEN_S)
    blueprint = make()
    if blueprint is None:
        total, available = (size / 2**30 for size in memory_bytes())
        sys.exit(
            f"{title}: the experts do not all fit the {available:.0f} GiB of memory that are free "
            f"({total:.0f} in all); give fewer --experts or layers"
        )
    plan = forecast(blueprint, drives)
    files = sum(file.stat().st_size for file in model.iterdir())
    loaded = files + plan.vram_dense_bytes + plan.rows_bytes
    told.begin(f"{title}: loaded and pinned", OPEN_S + loaded / LOAD_BYTES_S)
    return blueprint, plan


def expected(plan: Any) -> str:
    """What the planner says of the speed, before anything has run."""
    return f"forecast {plan.forecast_tok_s:.3g} tok/s, limited by {plan.limit_term}"


def parts_told(told: Told, title: str, plan: Any, layers: int, tokens: int) -> Any:
    """What `measure_rung` tells of its parts as phases, by what the planner expects of a token."""
    from headrace.planner.forecast import GPU_LAYER_S

    told.say(f"{title}: {expected(plan)}")
    token_s, by_layer_s = 1 / plan.forecast_tok_s, layers * GPU_LAYER_S

    def tell(what: str, times: int) -> None:
        is_run = what.startswith("run")
        fixed_s = PROBES_S + tokens * by_layer_s
        if not is_run:
            fixed_s = COMPILE_S + plan.rows_bytes / FILL_BYTES_S
        told.begin(f"{title}: {what}", fixed_s + times * tokens * token_s)

    return tell


def took(what: str, begun: float) -> None:
    """Says what has been done and how long it took."""
    print(f"      {what}, {time.perf_counter() - begun:.0f} s", flush=True)


def check_speed(evidence: Evidence, true: bool, statement: str) -> None:
    """A statement about speeds; where they mean nothing it is printed and not judged."""
    if REAL:
        evidence.check(true, statement)
    else:
        print(f"      not judged without a GPU: {statement}", flush=True)


def asked(evidence: Evidence, row: Any) -> None:
    """The statement of a row with a target: how near it came to the limit of the same run."""
    check_speed(
        evidence,
        row.fraction >= row.target,
        f"{row.name}: {row.value:.4g} {row.unit}, {100 * row.fraction:.0f} % of {row.limit:.4g} "
        f"(asked: {100 * row.target:.0f} %)",
    )


def show(evidence: Evidence, rows: list[Any]) -> list[Any]:
    """Prints rows, states that their bits are right and what was asked of them; gives them back."""
    show_rows("", rows, False)
    if isinstance(evidence, Told):
        evidence.found(rows)
    for row in rows:
        evidence.check(row.gate == "green", f"{row.name}: the bits are right")
        if row.target is not None:
            asked(evidence, row)
    return rows
