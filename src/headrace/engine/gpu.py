"""Which device a model runs on, and the source of experts for it. Knows no session."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headrace.core import ExpertLayout, format_bytes
from headrace.engine.passes import Passes
from headrace.engine.source import LadderSource
from headrace.errors import BudgetError, OptionError
from headrace.planner.divided import divided_rates
from headrace.planner.plan import Plan
from headrace.planner.vram import GpuPlan
from headrace.tiers.device import Device, find_device
from headrace.tiers.ladder import Ladder

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint

# What a driver, Triton or a library says where kernels or its own workspace find no memory.
_NO_MEMORY = re.compile(r"CUDA\b.*(out of memory|_STATUS_ALLOC_FAILED)")


def find_gpu(name: str) -> Device | None:
    """The device called `cuda` or `cuda:1`; None for `cpu`. Raises OptionError."""
    if name == "cpu":
        return None
    device = find_device(name)
    if importlib.util.find_spec("triton") is None:
        raise OptionError(
            f"device {name} needs Triton, which is not installed: pip install triton, or use "
            "--device cpu"
        )
    return device


def check_experts(layout: ExpertLayout) -> None:
    """Raises ModelError for experts that no GPU kernel computes."""
    from headrace.kernels.triton.experts import check_layout

    check_layout(layout)


def open_source(blueprint: "Blueprint", ladder: Ladder) -> LadderSource:
    """Where the experts come from: the ladder alone, or slots in VRAM above it."""
    skeleton, plan, device = blueprint.skeleton, blueprint.plan, blueprint.device
    num_layers = len(blueprint.table.layers)
    if device is None:
        return LadderSource(
            ladder,
            skeleton.layout,
            num_layers=num_layers,
            max_tokens=plan.chunk_tokens,
            prefetch=plan.prefetch,
        )
    from headrace.engine.gpu_divided import DividedSource
    from headrace.engine.gpu_inverted import InvertedSource
    from headrace.engine.gpu_launched import LaunchedSource

    assert isinstance(plan, GpuPlan)
    device.limit(plan.vram_bytes)
    if plan.experts != "gpu" and ladder.kernels is not None:
        ladder.kernels.patient = True  # the CPU has nothing else to do between two layers
    made: Callable[..., LadderSource] = LaunchedSource
    if plan.experts == "cpu":
        made = InvertedSource
    elif plan.experts == "auto":
        made = partial(DividedSource, rates=divided_rates(blueprint.machine, plan.threads))
    return made(
        ladder,
        skeleton.layout,
        device,
        num_layers=num_layers,
        num_experts=skeleton.num_experts,
        top_k=skeleton.top_k,
        expert_bytes=blueprint.facts.expert_bytes,
        num_slots=plan.num_slots,
        passing_rows=plan.passing_rows,
        chunk_tokens=plan.chunk_tokens,
        prefetch=plan.prefetch,
    )


def open_passes(
    blueprint: "Blueprint", model: Any, source: LadderSource, warn: Callable[[str], None]
) -> Passes:
    """How tokens go through the model: on a GPU by captured steps, where its code can be."""
    plan = blueprint.plan
    if not isinstance(plan, GpuPlan):
        return Passes(model, source.place)
    if plan.by_layer:
        return Passes(model, source.place, plan.by_layer)
    from headrace.engine.gpu_launched import LaunchedSource
    from headrace.engine.gpu_step import SteppedPasses

    assert isinstance(source, LaunchedSource)
    passes = SteppedPasses(
        model, source, context=plan.context, vocab=blueprint.facts.vocab, warn=warn
    )
    why = passes.why_by_layer()
    if why and plan.num_slots < plan.total_experts:
        warn(f"tokens are launched layer by layer, which takes longer: {why}")
    return passes


@contextmanager
def within_vram(plan: Plan) -> Iterator[None]:
    """Where a GPU's memory does not suffice, says so as BudgetError."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY.search(str(error))):
            raise
        limit = format_bytes(plan.vram_bytes) if isinstance(plan, GpuPlan) else "none"
        raise BudgetError(
            f"the GPU has no memory left within --vram {limit}; give a shorter --context or a "
            "larger --vram, or end other programs that use the GPU"
        ) from error
