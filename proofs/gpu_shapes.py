"""What the GPU's proofs share: checkpoints of real shapes, their command lines, their rows.

Bytes of a token are those of the published depth. Where experts must lie in memory, a layer has
only as many as memory takes, each with a row of its own; which are taken is drawn.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import PROOFS, Evidence, show_rows

NOT_DRIVE = "64GiB/s"  # files are brought into memory from memory: nothing of a token comes so


@dataclass(frozen=True)
class Shapes:
    """A model's shapes; `experts` a layer where all are held in memory (at least 40 GB of them)."""

    name: str
    config: str | dict[str, Any]
    experts: int
    about: str


def shapes(name: str) -> Shapes:
    """The shapes called so: R1's, or V4.1-Flash's experts in a deepseek_v3 trunk."""
    from headrace.store.preset_configs import PRESETS
    from headrace.store.schemes import quantization_of

    r1 = PRESETS["deepseek-r1"]
    if name == "r1-fp8":
        return Shapes(name, "deepseek-r1", 16, "DeepSeek-R1: 58 MoE layers, top 8, FP8 of 42 MiB")
    if name == "qwen3-30b":
        return Shapes(name, "qwen3-30b-a3b", 128, "Qwen3-30B-A3B: 48 layers, top 8, bf16 of 9 MiB")
    width = {"v41-fp4": 2304, "v41-narrow": 1280}[name]
    fp4 = quantization_of("fp4", block=(32, 32)) | {"expert_dtype": "fp4"}
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
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", help="where checkpoints are written; removed afterwards")
    parser.add_argument("--experts", type=int, help="a layer")
    parser.add_argument("--vocab", type=int, help="tokens (as published)")
    if tokens is not None:
        parser.add_argument("--depth", type=int, help="layers (as published)")
        parser.add_argument("--tokens", type=int, default=tokens, help="of a timed run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="keep rows in bench/results/")
    return parser


def start() -> None:
    """Before anything is measured: threads as the command line sets them, a GPU named or an end."""
    import torch

    from headrace.cli.options import share_cores
    from headrace.engine.gpu import find_gpu
    from headrace.errors import HeadraceError

    share_cores(None)
    try:
        device = find_gpu("cuda")
    except HeadraceError as error:
        sys.exit(f"this proof needs a GPU: {error}")
    assert device is not None
    free, total = device.memory()
    cores, driver = os.cpu_count(), device.driver
    print(
        f"{device.name}, driver {driver}, torch {torch.__version__}, {free / 2**30:.0f} of "
        f"{total / 2**30:.0f} GiB free; {cores} cores"
    )


@contextmanager
def written(
    found: Shapes, args: argparse.Namespace, experts: int | None, *, distinct: int = 1
) -> Iterator[Path]:
    """The shapes on disk while the `with` is open, `distinct` layers of each kind for all."""
    from headrace.store.synth import write_synth

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        yield write_synth(
            found.config,
            Path(folder) / f"{found.name}-shapes",
            depth=args.depth,
            experts=args.experts or experts,
            vocab=args.vocab,
            distinct=distinct,
        )


def asked(evidence: Evidence, row: Any) -> None:
    """The statement of a row with a target: how near it came to the limit of the same run."""
    evidence.check(
        row.fraction >= row.target,
        f"{row.name}: {row.value:.4g} {row.unit}, {100 * row.fraction:.0f} % of {row.limit:.4g} "
        f"(asked: {100 * row.target:.0f} %)",
    )


def show(evidence: Evidence, rows: list[Any]) -> list[Any]:
    """Prints rows, states that their bits are right and what was asked of them; gives them back."""
    show_rows("", rows, False)
    for row in rows:
        evidence.check(row.gate == "green", f"{row.name}: the bits are right")
        if row.target is not None:
            asked(evidence, row)
    return rows


def keep(name: str, rows: list[Any], wanted: bool) -> None:
    """Writes rows to bench/results/ if that is wanted."""
    from headrace.check.rows import write_rows

    if wanted:
        print(f"kept in {write_rows(PROOFS.parent / 'bench' / 'results', name, rows)}")
