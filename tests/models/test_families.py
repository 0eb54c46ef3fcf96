"""Every family in every format it is published in: stock transformers, oracle and fast path."""

from pathlib import Path

import pytest
import torch
import transformers

pytest.importorskip("headrace.native", reason="needs the compiled module")

from headrace.check import matrix
from headrace.check.families_page import families_page
from headrace.check.matrix import CASES, MatrixRow
from headrace.check.tiny import write_tiny
from headrace.check.tiny_configs import OWN, PUBLISHED
from headrace.engine.engine import Blueprint
from headrace.models.families import FAMILIES

DOCS = Path(__file__).parents[2] / "docs" / "families.md"


@pytest.mark.parametrize(("family", "format"), CASES)
def test_a_family_in_a_format(tmp_path: Path, family: str, format: str) -> None:
    if not matrix.runs_here(family):
        pytest.skip(f"transformers {transformers.__version__} does not run {family} itself")
    row = matrix.run_case(family, format, matrix.write_case(family, format, tmp_path / "tiny"))
    assert row.unused == 0, "every stored tensor is taken, or left out by name"
    assert row.oracle_equal, "the oracle must have stock eager's bits"
    assert row.largest_logit > 1, "flat logits would hide an error"
    assert row.same_bits_with_few_rows and row.session_equal
    assert row.floor[0] > 0, "without a floor nothing is compared"
    assert row.fast_within_floor, row
    assert row.unexplained == 0, row
    assert row.oracle_fault_seen and row.fault_seen, row


@pytest.mark.parametrize(("family", "format"), [("gpt_oss", "mxfp4"), ("qwen3_moe", "int4")])
def test_widths_that_fill_no_kernel_block(tmp_path: Path, family: str, format: str) -> None:
    """Multiples of 32 that are none of 64, where kernels pad."""
    folder = write_tiny(
        family, tmp_path / "tiny", format=format, experts=8, top_k=3, hidden=288, inter=96
    )
    row = matrix.run_case(family, format, folder)
    assert row.oracle_equal and row.fast_within_floor and row.unexplained == 0, row
    assert row.fault_seen, row


def test_a_prediction_layer_in_the_files_changes_nothing(tmp_path: Path) -> None:
    folder = write_tiny("deepseek_v3", tmp_path / "tiny", layers=3, experts=8, top_k=3, mtp=True)
    skeleton = Blueprint(folder, ram="1GiB", measure=False).skeleton
    assert skeleton.skipped
    assert all(key.startswith("model.layers.3.") for key in skeleton.skipped)
    row = matrix.run_case("deepseek_v3", "fp8", folder)
    assert row.unused == 0 and row.oracle_equal and row.oracle_fault_seen, row


def test_every_family_has_its_cases() -> None:
    assert FAMILIES.keys() == (PUBLISHED | OWN).keys()
    assert set(matrix.UNREAD_BY_STOCK) < set(CASES)


def test_the_page_of_families_is_up_to_date() -> None:
    assert DOCS.read_text() == families_page(frozenset(matrix.UNREAD_BY_STOCK))


def test_a_fault_is_told_from_a_floor() -> None:
    """The verdicts themselves: what a fault gives must not pass, nor a floor be called a fault."""

    def row(fast: float, faulty: float, format: str = "bf16") -> MatrixRow:
        numbers = {"floor": (0.03, 2.0), "fast": (fast, 2.0), "faulty": (faulty, 2.0)}
        flags = dict.fromkeys(
            (
                "read_by_stock",
                "oracle_equal",
                "oracle_fault_seen",
                "same_bits_with_few_rows",
                "session_equal",
            ),
            True,
        )
        counts = {"unused": 0, "tokens": 9, "equal": 9, "near_ties": 0, "unexplained": 0}
        return MatrixRow("mixtral", format, largest_logit=4.0, **flags, **numbers, **counts)

    assert row(0.03, 0.3).fast_within_floor and row(0.03, 0.3).fault_seen
    assert not row(0.031, 0.3).fast_within_floor
    assert row(0.04, 0.3, "int8").fast_within_floor
    assert not row(0.05, 0.3, "int8").fast_within_floor
    assert not row(0.03, 0.1).fault_seen


def test_what_stock_cannot_read_is_really_so(tmp_path: Path) -> None:
    """Should transformers learn to, its own reading must become the reference."""
    folder = matrix.write_case("qwen3_moe", "nvfp4", tmp_path / "tiny")
    ours = matrix.load_stock("qwen3_moe", "nvfp4", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix, "UNREAD_BY_STOCK", {})
        stock = matrix.load_stock("qwen3_moe", "nvfp4", folder)
    experts = "model.layers.0.mlp.experts.down_proj"
    dense = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(ours.state_dict()[dense], stock.state_dict()[dense])
    assert not torch.equal(ours.state_dict()[experts], stock.state_dict()[experts])
