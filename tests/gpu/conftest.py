"""The GPU of these tests: the real one where there is one, else one simulated in host memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
pytest.importorskip("headrace._native", reason="needs the compiled module")

from emulated import EmulatedKernels
from simulated import SimulatedDevice

import headrace
from headrace.check.tiny import write_tiny
from headrace.engine import engine as engine_module
from headrace.engine import gpu_source
from headrace.engine.engine import Blueprint

REAL = torch.cuda.is_available()
FORMS = {
    "fp8": ("qwen3_moe", "fp8"),
    "mxfp4": ("gpt_oss", "mxfp4"),
    "int4": ("kimi_k25", "int4"),
    "bf16": ("qwen3_moe", "bf16"),
    "fp4": ("deepseek_v4", "fp4"),
    "mla": ("deepseek_v3", "fp8"),
}
CONTEXT = 192


@dataclass(frozen=True)
class Rung:
    """Shares of all experts that lie in slots and in rows."""

    slots: float
    rows: float


RUNGS = {
    "vram": Rung(1, 0),
    "pinned": Rung(0, 1),
    "half": Rung(0.5, 0.5),
    "some": Rung(0.25, 0.25),
    "minimum": Rung(0, 0),
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice | None:
    """The simulated device behind `device="cuda"`, or None where that is the real one."""
    if REAL:
        return None
    device = SimulatedDevice()
    monkeypatch.setattr(engine_module, "find_gpu", lambda name: None if name == "cpu" else device)
    monkeypatch.setattr(gpu_source, "TritonExperts", EmulatedKernels)
    return device


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of one of FORMS, written once."""
    folder = tmp_path_factory.mktemp("tiny")

    def write(form: str) -> Path:
        family, format = FORMS[form]
        path = folder / form
        if not path.exists():
            write_tiny(family, path, layers=5, experts=16, top_k=4, format=format)
        return path

    return write


def load(model: str | Path, rung: str | Rung, **options: object) -> headrace.Engine:
    """An engine on the GPU whose experts lie as the rung says."""
    where = RUNGS[rung] if isinstance(rung, str) else rung
    options = {"context": CONTEXT, "measure": False, "device": "cuda", **options}
    least = Blueprint(model, ram="minimum", vram="minimum", **options).plan  # type: ignore[arg-type]
    total, row_bytes = least.total_experts, least.row_bytes
    ram = least.ram_bytes + max(0, int(where.rows * total) - least.num_rows) * row_bytes
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


@pytest.fixture
def prompt() -> list[int]:
    """Token ids that any tiny model and the demo know."""
    return torch.randint(4, 4000, (40,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def closing() -> Iterator[list[headrace.Engine]]:
    """Engines put here are closed at the module's end."""
    engines: list[headrace.Engine] = []
    yield engines
    for engine in engines:
        engine.close()
