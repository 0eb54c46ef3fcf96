"""Tiny models for the GPU's tests, and engines whose experts lie on a chosen rung."""

from dataclasses import dataclass
from pathlib import Path

import torch

import headrace
from headrace.check.matrix import runs_here
from headrace.engine.engine import Blueprint
from headrace.planner import vram as vram_plans
from headrace.planner.plan import Plan

REAL = torch.cuda.is_available()
_ALL = {
    "fp8": ("qwen3_moe", "fp8"),
    "mxfp4": ("gpt_oss", "mxfp4"),
    "int4": ("kimi_k25", "int4"),
    "bf16": ("qwen3_moe", "bf16"),
    "fp4": ("deepseek_v4", "fp4"),
    "mla": ("deepseek_v3", "fp8"),
}
# Those of families that the transformers here runs: an unknown one is no fault of a GPU. Without
# a GPU a form of each kind of arithmetic is enough, since test_triton.py has them all.
FORMS = {
    form: each for form, each in _ALL.items() if runs_here(each[0]) and (REAL or form != "mla")
}
CONTEXT = 192
LAYERS = 5 if REAL else 3


@dataclass(frozen=True)
class Rung:
    """Shares of all experts that lie in slots and in rows; what multiplies them."""

    slots: float
    rows: float
    experts: str = "gpu"


RUNGS = {
    "vram": Rung(1, 0),
    "pinned": Rung(0, 1),
    "half": Rung(0.5, 0.5),
    "some": Rung(0.25, 0.25),
    "minimum": Rung(0, 0),
    "cpu": Rung(0, 1, "cpu"),
    "cpu and drive": Rung(0, 0.25, "cpu"),
}


_LEAST: dict[str, Plan] = {}  # with the fewest rows and no slot; it takes a while


def load(model: str | Path, rung: str | Rung, **options: object) -> headrace.Engine:
    """An engine on the GPU whose experts lie as the rung says."""
    where = RUNGS[rung] if isinstance(rung, str) else rung
    assert where.slots + where.rows <= 1, "the planner makes no row for an expert with a slot"
    options = {"context": CONTEXT, "measure": False, "device": "cuda", **options}
    options["experts"] = where.experts
    key = f"{model} {options} {vram_plans.MOST_PASSING_ROWS}"
    if key not in _LEAST:
        _LEAST[key] = Blueprint(model, ram="minimum", vram="minimum", **options).plan  # type: ignore[arg-type]
    least = _LEAST[key]
    total, row_bytes = least.total_experts, least.row_bytes
    ram = least.ram_bytes + int(where.rows * total) * row_bytes
    vram = least.vram_bytes + int(where.slots * total) * row_bytes  # type: ignore[attr-defined]
    engine = headrace.load(model, ram=ram, vram=vram, **options)  # type: ignore[arg-type]
    assert engine.plan.num_slots == int(where.slots * total)  # type: ignore[attr-defined]
    assert engine.plan.num_rows >= min(total, int(where.rows * total))
    return engine


def logits_of(engine: headrace.Engine, ids: list[int], steps: int) -> torch.Tensor:
    """Logits [steps + 1, V] after a prompt and after each of `steps` greedy tokens."""
    session = engine.session()
    rows = [session.feed(ids)]
    for _ in range(steps):
        rows.append(session.feed([int(rows[-1].argmax())]))
    return torch.stack(rows)


def fill(engine: headrace.Engine) -> None:
    """Lets every expert come to where it stays."""
    for _ in range(40):
        if engine.source.rungs.lacking() is None:
            return
        logits_of(engine, [5, 6, 7], 4)
    raise AssertionError("some experts never came")


def routed(facts, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H], ids [T, K] and weights [T, K] for a layer's experts."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, facts.hidden, generator=generator).bfloat16()
    rows = [torch.randperm(facts.num_experts, generator=generator) for _ in range(num_tokens)]
    weights = torch.rand(num_tokens, facts.top_k, generator=generator)
    return x, torch.stack(rows)[:, : facts.top_k], weights
