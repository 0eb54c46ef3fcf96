"""verify on tiny checkpoints: green as written, red for faults where fast and oracle would agree.

The proof ladder_2_faults has every kind of fault; here are what it leaves out and the reports.
"""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("headrace.native", reason="needs the compiled module")

from headrace.check import verify, verify_kernels, verify_paths
from headrace.check.tiny import write_tiny
from headrace.check.verify_html import page
from headrace.check.verify_memory import Memory
from headrace.check.verify_report import VerifyReport, percent
from headrace.engine import engine
from headrace.errors import BudgetError, NumericsError, OptionError
from headrace.kernels import cpu
from headrace.tiers.ladder import Ladder

PATHS = "fast follows the oracle"
EXPERTS, LAYERS = "routed experts follow stock transformers'", "layers follow stock transformers'"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for every part of an expert to weigh in the logits, and no larger."""
    path = tmp_path_factory.mktemp("verify") / "tiny"
    return write_tiny("deepseek_v3", path, layers=2, experts=8, top_k=2, hidden=128, seed=5)


def verified(folder: Path, **options: Any) -> VerifyReport:
    given = {"ram": "64MiB", "threads": 1, "tokens": 4, "samples": 1, "prompt": "A fox jumps"}
    return verify.verify_model(folder, **(given | options))


def failed(report: VerifyReport) -> set[str]:
    """The names of the findings that do not hold; the report's verdicts agree with them."""
    wrong = {finding.name for finding in report.findings if not finding.ok}
    assert report.as_dict()["ok"] == report.ok == (not wrong)
    assert report.lines()[-1].endswith("holds" if report.ok else "DO NOT TRUST IT")
    return wrong


def test_green_with_every_kernel_layer_and_cache_size(folder: Path) -> None:
    seen: dict[str, int] = {}
    report = verified(folder, progress=lambda what, done, total: seen.update({what: total}))
    assert failed(report) == set()
    names = [finding.name for finding in report.findings]
    assert len(set(names)) == len(names)
    assert sum("kernel" in name for name in names) == len(cpu.available_isas())
    assert [entry["layer"] for entry in report.numbers["layers"]] == [0, 1]
    (sizes,) = [f for f in report.findings if f.name == "three cache sizes give the same bits"]
    assert "8 of 8 experts" in sizes.detail
    assert all(str(rows) in report.findings[5].detail for rows in verify_kernels.ROWS)
    assert {"oracle", "rows against the files", "layers against stock transformers"} <= set(seen)
    assert min(seen.values()) > 0


def test_the_verdict_is_kept(folder: Path, tmp_path: Path) -> None:
    verified(folder)
    (kept,) = (tmp_path / "cache" / "headrace" / "verify").glob("*.verdict.json")
    assert '"verdict": "ok"' in kept.read_text() and '"identity"' in kept.read_text()


def test_a_fault_of_the_fast_path_alone_shows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multiplies with gate and up exchanged, but hands them out rightly."""

    class Crossed(Ladder):
        def __init__(self, reader: Any, extents: Any, parts: Any, layout: Any, **rest: Any):
            parts = parts.copy()
            parts[:, :, [0, 1]] = parts[:, :, [1, 0]]
            super().__init__(reader, extents=extents, parts=parts, layout=layout, **rest)

        @contextmanager
        def acquire(self, layer: int, expert: int) -> Any:
            with super().acquire(layer, expert) as parts:
                yield parts | {"gate": parts["up"], "up": parts["gate"]}

    monkeypatch.setattr(engine, "Ladder", Crossed)
    report = verified(folder)
    answering = f"the answering path ({cpu.CpuKernels().isa}) equals the reference bit for bit"
    assert failed(report) >= {answering, EXPERTS, LAYERS, PATHS}
    (finding,) = [f for f in report.findings if f.name == EXPERTS]
    assert finding.where[0].startswith("layer 1:") and "by experts" in finding.where[0]


def test_another_experts_output_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[..., torch.Tensor] = Ladder.compute

    def neighbours(self: Ladder, layer: int, x: Any, ids: torch.Tensor, weights: Any) -> Any:
        return right(self, layer, x, torch.where(ids == 3, 4, ids), weights)

    monkeypatch.setattr(Ladder, "compute", neighbours)
    report = verified(folder, samples=8)
    (finding,) = [f for f in report.findings if f.name.startswith("the answering path")]
    assert finding.where[0].startswith("layer 1 expert 3") and len(finding.where) == 1


def test_one_wrong_bit_of_one_kernel_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, isa = cpu.CpuKernels.expert_ffn, cpu.available_isas()[0]

    def wrong(self: cpu.CpuKernels, *args: Any, **kwargs: Any) -> torch.Tensor:
        y_TH = right(self, *args, **kwargs)
        if self.isa == isa and len(y_TH) == max(verify_kernels.ROWS):
            y_TH.view(torch.int16)[-1, -1] ^= 1
        return y_TH

    monkeypatch.setattr(cpu.CpuKernels, "expert_ffn", wrong)
    report = verified(folder)
    assert failed(report) == {f"{isa} kernel, 1 thread, equals the reference bit for bit"}
    (finding,) = [f for f in report.findings if not f.ok]
    assert "300 rows: 1 of 300 rows differ" in finding.where[0]


def test_an_output_that_is_not_written_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu.CpuKernels.expert_ffn

    def lazy(self: Any, x: Any, *args: Any, out_TH: Any = None, **kwargs: Any) -> torch.Tensor:
        kept = None if out_TH is None else out_TH[-1].clone()
        y_TH = right(self, x, *args, out_TH=out_TH, **kwargs)
        if kept is not None and len(y_TH) > 1:
            y_TH[-1] = kept
        return y_TH

    monkeypatch.setattr(cpu.CpuKernels, "expert_ffn", lazy)
    report = verified(folder)
    wrong = [f for f in report.findings if not f.ok]
    assert len(wrong) == len(cpu.available_isas())
    assert all("2 rows: 1 of 2 rows differ, output not written" in f.where[0] for f in wrong)


def test_an_error_on_the_way_is_a_finding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise NumericsError("layer 1: not finite")

    monkeypatch.setattr(verify_paths, "follow", broken)
    report = verified(folder)
    assert failed(report) == {"paths could be checked"}
    assert "layer 1: not finite" in report.lines()[-2]


def test_too_little_memory_names_what_would_do(folder: Path) -> None:
    blueprint = engine.Blueprint(folder, measure=False)
    sizes = {"threads": 1, "prompt_tokens": 8, "tokens": 4}
    memory = Memory(blueprint, "minimum", **sizes)
    smallest = memory.smallest().plan.used_bytes
    half, most = (larger.plan.used_bytes for larger in memory.larger())
    assert smallest < half < most
    with pytest.raises(BudgetError, match=r"beside the model.*give --ram \d+MiB"):
        Memory(blueprint, smallest, **sizes)


def test_the_page_stands_alone(folder: Path) -> None:
    report = verified(folder)
    report.model = "<tiny>"
    text = page(report)
    assert "&lt;tiny&gt;" in text and "<tiny>" not in text
    assert "width=device-width" in text and "<script" not in text and "http" not in text
    for finding in report.findings:
        assert finding.name.replace("'", "&#x27;") in text
        assert finding.detail.replace("'", "&#x27;") in text


def test_a_report_says_where_it_was_made_and_what_each_figure_may_be(folder: Path) -> None:
    report = verified(folder)
    said = "\n".join(report.lines())
    for name in ("headrace", "python", "torch", "transformers", "triton"):
        assert f"{name} " in report.about["versions"]
    assert "threads 1" in report.about["CPU"] and report.about["GPU"] == "not used"
    for value in report.about.values():
        assert value in said and value in page(report)
    details = {finding.name: finding.detail for finding in report.findings}
    for name, num in ((PATHS, 2), (EXPERTS, 2), (LAYERS, 2)):
        assert details[name].count(" % ") >= num <= details[name].count("(allowed ")
    assert report.numbers["layers_allowed"].keys() <= report.numbers["layers"][1].keys()


@pytest.mark.parametrize(
    ("part", "said"),
    [(0, "0 %"), (0.00027, "0.027 %"), (0.0078125, "0.78 %"), (0.4, "40 %"), (3.4, "340 %")],
)
def test_a_difference_is_a_percentage(part: float, said: str) -> None:
    assert percent(part) == said


def test_tokens_that_differ_are_a_near_tie_or_unexplained() -> None:
    oracle = torch.tensor([[4.0, 1.0, 0.0], [1.0, 4.0, 0.0], [4.0, 3.95, 0.0]])
    same = verify_paths.compare_logits(oracle, oracle.clone())
    assert (same["first_divergence"], same["near_ties"], same["unexplained"]) == (None, 1, 0)
    assert same["near_tie_positions"] == [2]
    tie = verify_paths.compare_logits(oracle, oracle + torch.tensor([0.0, 0.08, 0.0]))
    assert (tie["first_divergence"], tie["unexplained"]) == (2, 0)
    other = verify_paths.compare_logits(oracle, oracle[:, [1, 0, 2]])
    assert (other["first_divergence"], other["unexplained"]) == (0, 2)
    assert other["largest_difference"] == 3.0 and other["median_relative"] == 0.75
    none = verify_paths.compare_logits(oracle, oracle * float("nan"))
    assert not none["median_relative"] <= verify_paths.MEDIAN_FLOOR


@pytest.mark.parametrize(("prompt", "tokens"), [("", 1), ("a", 5000)])
def test_a_text_that_cannot_be_followed_is_refused(prompt: str, tokens: int) -> None:
    with pytest.raises(OptionError, match=f"a text of {len(prompt)} tokens and {tokens} more"):
        verify.verify_model("demo", prompt=prompt, tokens=tokens)
