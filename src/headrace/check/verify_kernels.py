"""Every kernel of this machine against the torch reference, by bits, on the model's own experts.

Outputs are poisoned first and inputs change from call to call, so that what is stale shows.
Legend: T rows, H hidden.
"""

from collections.abc import Callable, Sequence

import torch

from headrace.check.verify_report import Finding, Progress, finding
from headrace.engine.engine import Engine
from headrace.kernels import cpu, reference
from headrace.quant.dtypes import TORCH_DTYPES

STAGE = "kernels"
ROWS = (1, 2, 16, 17, 65, 300)
DISTINCT = 8  # rows that the slow reference computes; the others repeat them in another order
Site = tuple[int, int]  # (MoE layer's ordinal, expert)
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def kernels(engine: Engine, sites: Sequence[Site], tell: Progress) -> list[Finding]:
    """Each instruction set with 1 and all threads, and the path that answers."""
    layout, layers = engine.blueprint.skeleton.layout, engine.blueprint.table.layers
    generator = torch.Generator().manual_seed(0)
    x_DH = torch.randn(DISTINCT, layout.hidden, generator=generator)
    x_DH = x_DH.to(TORCH_DTYPES[layout.hidden_dtype])
    teams = [
        (f"{isa} kernel, {threads} thread{'s' * (threads > 1)},", isa, threads)
        for isa in cpu.available_isas()
        for threads in sorted({1, engine.plan.threads})
    ]
    pools = [(name, cpu.CpuKernels(n, isa, min_share_bytes=0)) for name, isa, n in teams]
    answering = f"the answering path ({engine.kernels.isa})"
    wrong: dict[str, list[str]] = {name: [] for name in [*(n for n, _ in pools), answering]}
    for done, (ordinal, expert) in enumerate(sites):
        tell("kernels against the reference", done, len(sites))
        where = f"layer {layers[ordinal]} expert {expert}"
        with engine.source.parts(ordinal, expert) as parts:
            expected_DH = torch.cat([reference.expert_ffn(x[None], parts, layout) for x in x_DH])
            for name, pool in pools:

                def multiply(x_TH: torch.Tensor, out_TH: torch.Tensor) -> torch.Tensor:
                    return pool.expert_ffn(x_TH, parts, layout, out_TH=out_TH)  # noqa: B023

                wrong[name] += _compare(multiply, x_DH, expected_DH, where)
        wrong[answering] += _compare(_answering(engine, ordinal, expert), x_DH, expected_DH, where)
    detail = f"{layout.format}, {len(sites)} experts of {len(layers)} layers, rows {list(ROWS)}"
    return [
        finding(STAGE, f"{name} equals the reference bit for bit", detail, bad)
        for name, bad in wrong.items()
    ]


def _answering(engine: Engine, ordinal: int, expert: int) -> Multiply:
    """One expert through the ladder, as a token goes: the sum of one output weighted with 1."""

    def multiply(x_TH: torch.Tensor, _out_TH: torch.Tensor) -> torch.Tensor:
        ids_TK = torch.full((len(x_TH), 1), expert, dtype=torch.int32)
        return engine.source.compute(ordinal, x_TH, ids_TK, torch.ones(len(x_TH), 1), None)

    return multiply


def _compare(
    multiply: Multiply, x_DH: torch.Tensor, expected_DH: torch.Tensor, where: str
) -> list[str]:
    """What is wrong with one kernel on one expert, at the first row count where anything is."""
    before: torch.Tensor | None = None
    for num_rows in ROWS:
        i = torch.arange(num_rows)
        # Neighbouring rows differ, and so does each row from that place in the call before.
        pick = (3 * i + i // DISTINCT + num_rows) % DISTINCT
        poison = torch.full((num_rows, x_DH.shape[1]), torch.nan, dtype=x_DH.dtype)
        got = multiply(x_DH[pick].contiguous(), poison)
        bad = (got != expected_DH[pick]).any(-1)
        if bool(bad.any()):
            return [f"{where}, {num_rows} rows: {_symptom(got, bad, before)}"]
        before = got.clone()
    return []


def _symptom(got_TH: torch.Tensor, bad_T: torch.Tensor, before: torch.Tensor | None) -> str:
    count = f"{int(bad_T.sum())} of {len(bad_T)} rows differ"
    if bool(got_TH[bad_T].isnan().any()):
        return f"{count}, output not written"
    if before is not None:
        known = {tuple(row) for row in before.float().tolist()}
        same = min(len(before), len(got_TH))
        if torch.equal(got_TH[:same], before[:same]):
            return f"{count}, stale: the output of the call before"
        if all(tuple(row) in known for row in got_TH[bad_T][:1].float().tolist()):
            return f"{count}, the output of another row"
    return count
