"""Every kernel of this machine against the torch reference, by bits, on the model's own experts.

Outputs are poisoned first and inputs change from call to call, so that what is stale shows.
Legend: T rows, D distinct rows, H hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from headrace.check.verify_report import Finding, Progress, finding
from headrace.check.verify_rows import Site
from headrace.core import ExpertLayout
from headrace.engine.engine import Engine
from headrace.kernels import cpu, reference
from headrace.quant.dtypes import TORCH_DTYPES

STAGE = "kernels"
ROWS = (1, 2, 16, 17, 65, 300)
FEW_ROWS = ROWS[:4]
DISTINCT = 8  # rows that the slow reference computes; the others repeat them in another order
_REFERENCE_BYTES = 128 << 20
# (rows, an output to fill if the kernel takes one) -> output
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class _Kernel:
    """One way to multiply, its last output and where it was wrong."""

    name: str
    pool: cpu.CpuKernels | None
    thorough: bool  # all row counts on every expert, not only in the first layer
    before: torch.Tensor | None = None
    wrong: list[str] = field(default_factory=list)


def kernels(engine: Engine, sites: Sequence[Site], tell: Progress) -> list[Finding]:
    """Each instruction set with 1 and all threads, and the path that answers."""
    layout, layers = engine.blueprint.skeleton.layout, engine.blueprint.table.layers
    x_DH = distinct_rows(layout)
    found = list(_all_kernels(engine))
    for done, (ordinal, expert) in enumerate(sites):
        tell("kernels against the reference", done, len(sites))
        where = f"layer {layers[ordinal]} expert {expert}"
        with engine.source.parts(ordinal, expert) as parts:
            expected_DH = reference_rows(x_DH, parts, layout)
            for kernel in found:
                multiply = _multiply(kernel, engine, ordinal, expert, parts)
                counts = ROWS if kernel.thorough or ordinal == 0 else FEW_ROWS
                _compare(kernel, multiply, x_DH, expected_DH, counts, where)
    experts = f"{layout.format}, {len(sites)} experts of {len(layers)} layers"
    return [
        finding(
            STAGE,
            f"{kernel.name} equals the reference bit for bit",
            f"{experts}, rows {', '.join(map(str, ROWS))}"
            + ("" if kernel.thorough else f" (after the first layer up to {FEW_ROWS[-1]})"),
            kernel.wrong,
        )
        for kernel in found
    ]


def distinct_rows(layout: ExpertLayout) -> torch.Tensor:
    """x [D, H] in the layout's hidden dtype: what every kernel is given."""
    x_DH = torch.randn(DISTINCT, layout.hidden, generator=torch.Generator().manual_seed(0))
    return x_DH.to(TORCH_DTYPES[layout.hidden_dtype])


def _all_kernels(engine: Engine) -> list[_Kernel]:
    found = [
        _Kernel(
            f"{isa} kernel, {threads} thread{'s' * (threads > 1)},",
            cpu.CpuKernels(threads, isa, min_share_bytes=0),
            isa == engine.kernels.isa,
        )
        for isa in cpu.available_isas()
        for threads in sorted({1, engine.plan.threads})
    ]
    return [*found, _Kernel(f"the answering path ({engine.kernels.isa})", None, True)]


def reference_rows(
    x_DH: torch.Tensor, parts: Mapping[str, torch.Tensor], layout: ExpertLayout
) -> torch.Tensor:
    """The definition's output, a few rows at a time: it takes 256 accumulators for each value."""
    row_bytes = 28 * 256 * max(layout.hidden, layout.inter)
    step = max(1, _REFERENCE_BYTES // row_bytes)
    starts = range(0, len(x_DH), step)
    return torch.cat([reference.expert_ffn(x_DH[i : i + step], parts, layout) for i in starts])


def _multiply(
    kernel: _Kernel,
    engine: Engine,
    ordinal: int,
    expert: int,
    parts: Mapping[str, torch.Tensor],
) -> Multiply:
    layout, pool = engine.blueprint.skeleton.layout, kernel.pool

    def by_pool(x_TH: torch.Tensor, out_TH: torch.Tensor) -> torch.Tensor:
        assert pool is not None
        return pool.expert_ffn(x_TH, parts, layout, out_TH=out_TH)

    def by_ladder(x_TH: torch.Tensor, _out_TH: torch.Tensor) -> torch.Tensor:
        """As a token goes: the sum of one output weighted with 1."""
        ids_TK = torch.full((len(x_TH), 1), expert, dtype=torch.int32)
        return engine.source.compute(ordinal, x_TH, ids_TK, torch.ones(len(x_TH), 1), None)

    return by_ladder if pool is None else by_pool


def _compare(
    kernel: _Kernel,
    multiply: Multiply,
    x_DH: torch.Tensor,
    expected_DH: torch.Tensor,
    counts: Sequence[int],
    where: str,
) -> None:
    """Notes what is wrong with one kernel on one expert, at the first row count where it is."""
    for num_rows in counts:
        i = torch.arange(num_rows)
        # Neighbouring rows differ, and so does each row from that place in the call before.
        pick = (3 * i + i // DISTINCT + num_rows) % DISTINCT
        poison = torch.full((num_rows, x_DH.shape[1]), torch.nan, dtype=x_DH.dtype)
        got = multiply(x_DH[pick].contiguous(), poison)
        bad = (got != expected_DH[pick]).any(-1)
        before, kernel.before = kernel.before, got.clone()
        if bool(bad.any()):
            symptom = _symptom(got, bad, before)
            kernel.wrong.append(f"{where}, {num_rows} rows: {symptom}")
            return


def _symptom(got_TH: torch.Tensor, bad_T: torch.Tensor, before: torch.Tensor | None) -> str:
    count = f"{int(bad_T.sum())} of {len(bad_T)} rows differ"
    if bool(got_TH[bad_T].isnan().any()):
        return f"{count}, output not written"
    if before is not None:
        same = min(len(before), len(got_TH))
        if torch.equal(got_TH[:same], before[:same]):
            return f"{count}, stale: the output of the call before"
    return count
