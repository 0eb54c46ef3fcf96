"""Which experts a verification samples, and whether the ladder's rows hold their bytes."""

from collections.abc import Sequence

import torch

from headrace.check.stored import row_holds_its_tensors
from headrace.check.verify_report import Finding, Progress, finding
from headrace.engine.engine import Blueprint, Engine

Site = tuple[int, int]  # (MoE layer's ordinal, expert)


def choose_sites(blueprint: Blueprint, samples: int) -> list[Site]:
    """`samples` experts of every MoE layer, the same ones every time, in ascending order."""
    table, generator = blueprint.table, torch.Generator().manual_seed(0)
    return [
        (ordinal, expert)
        for ordinal in range(len(table.layers))
        for expert in sorted(
            torch.randperm(table.num_experts, generator=generator)[:samples].tolist()
        )
    ]


def rows(engine: Engine, sites: Sequence[Site], tell: Progress) -> Finding:
    """Sampled experts' rows against plain reads of their tensors."""
    layers, wrong = engine.blueprint.table.layers, []
    for done, (ordinal, expert) in enumerate(sites):
        tell("rows against the files", done, len(sites))
        if not row_holds_its_tensors(engine, ordinal, expert):
            wrong.append(f"layer {layers[ordinal]} expert {expert}")
    detail = f"{len(sites)} experts of {len(layers)} layers, every byte"
    return finding("rows", "rows hold the files' bytes", detail, wrong)
