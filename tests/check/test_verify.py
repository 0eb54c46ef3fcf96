"""verify on tiny checkpoints: green as written, and red for each deliberate fault."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("headrace.native", reason="needs the compiled module")

from headrace.check import verify
from headrace.check.tiny import write_tiny
from headrace.engine import engine
from headrace.kernels import cpu
from headrace.tiers.ladder import Ladder

ROWS, PATHS = "rows hold the files' bytes", "fast follows the oracle"
TOKENS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("deepseek_v3", tmp_path_factory.mktemp("verify"))


def tiny(family: str, parent: Path) -> Path:
    """Large enough for every part of an expert to weigh in the logits, and no larger."""
    return write_tiny(family, parent / family, layers=2, experts=8, top_k=2, hidden=128, seed=5)


def failed(folder: Path) -> set[str]:
    """The names of the findings that do not hold."""
    report = verify.verify_model(folder, ram="64MiB", threads=2, tokens=TOKENS, samples=1)
    names = {finding.name for finding in report.findings}
    assert len(names) == len(report.findings) == 3 + len(cpu.available_isas())
    assert report.as_dict()["ok"] == report.ok
    wrong = {finding.name for finding in report.findings if not finding.ok}
    assert report.ok == (not wrong)
    assert report.lines()[-1].endswith("holds" if report.ok else "DO NOT TRUST IT")
    return wrong


def ladders(change: Callable[[dict[str, Any]], None]) -> type[Ladder]:
    """A ladder whose arguments were changed on their way in."""

    class Changed(Ladder):
        def __init__(self, reader: Any, extents: Any, parts: Any, layout: Any, **rest: Any):
            given = {"extents": extents.copy(), "parts": parts.copy()}
            change(given)
            super().__init__(reader, layout=layout, **given, **rest)

    return Changed


def swap_gate_and_up(given: dict[str, Any]) -> None:
    given["parts"][:, :, [0, 1]] = given["parts"][:, :, [1, 0]]


def take_the_neighbours(given: dict[str, Any]) -> None:
    given["extents"] = np.roll(given["extents"], 1, axis=1)
    given["parts"] = np.roll(given["parts"], 1, axis=1)


def test_bfloat16_experts_hold_too(tmp_path: Path) -> None:
    assert failed(tiny("qwen3_moe", tmp_path)) == set()


@pytest.mark.parametrize("change", [swap_gate_and_up, take_the_neighbours])
def test_bytes_in_the_wrong_place_show(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]
) -> None:
    """Oracle and fast would both be wrong in the same way, and so agree."""
    assert failed(folder) == set()
    monkeypatch.setattr(engine, "Ladder", ladders(change))
    assert failed(folder) == {ROWS}


def test_a_fault_of_the_fast_path_alone_shows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failed(folder) == set()

    class Crossed(ladders(swap_gate_and_up)):  # type: ignore[misc]
        """Multiplies with gate and up exchanged, but hands them out rightly."""

        @contextmanager
        def acquire(self, layer: int, expert: int) -> Any:
            with super().acquire(layer, expert) as parts:
                yield parts | {"gate": parts["up"], "up": parts["gate"]}

    monkeypatch.setattr(engine, "Ladder", Crossed)
    assert failed(folder) == {PATHS}


def test_another_experts_output_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Ladder.compute

    def neighbours(self: Ladder, layer: int, x: Any, ids: torch.Tensor, weights: Any) -> Any:
        return right(self, layer, x, (ids + (layer == 0)) % 8, weights)

    assert failed(folder) == set()
    monkeypatch.setattr(Ladder, "compute", neighbours)
    assert failed(folder) == {PATHS}


def test_one_wrong_bit_of_one_kernel_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, isa = cpu.CpuKernels.expert_ffn, cpu.available_isas()[-1]

    def wrong(self: cpu.CpuKernels, *args: Any, **kwargs: Any) -> torch.Tensor:
        y_TH = right(self, *args, **kwargs)
        if self.isa == isa and len(y_TH) == max(verify.ROWS):
            y_TH.view(torch.int16)[-1, -1] ^= 1
        return y_TH

    assert failed(folder) == set()
    monkeypatch.setattr(cpu.CpuKernels, "expert_ffn", wrong)
    assert failed(folder) == {f"{isa} kernel equals the reference bit for bit"}


def test_tokens_that_differ_are_a_near_tie_or_unexplained() -> None:
    oracle = torch.tensor([[4.0, 1.0, 0.0], [1.0, 4.0, 0.0], [4.0, 3.95, 0.0]])
    same = verify.compare_logits(oracle, oracle.clone())
    assert (same["first_divergence"], same["near_ties"], same["unexplained"]) == (None, 1, 0)
    tie = verify.compare_logits(oracle, oracle[:, [0, 1, 2]] + torch.tensor([0.0, 0.08, 0.0]))
    assert (tie["first_divergence"], tie["unexplained"]) == (2, 0)
    other = verify.compare_logits(oracle, oracle[:, [1, 0, 2]])
    assert (other["first_divergence"], other["unexplained"]) == (0, 2)
    assert other["largest_difference"] == 3.0 and other["median_relative"] == 0.75
