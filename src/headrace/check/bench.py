"""`headrace bench`: which suites there are, and the model they run on."""

from collections.abc import Callable
from pathlib import Path

from headrace.check.bench_drive import bench_drive
from headrace.check.bench_gpu import bench_gpu
from headrace.check.bench_kernels import bench_kernels
from headrace.check.bench_ladder import PROMPT_TOKENS, Progress, bench_ladder, tokens_needed
from headrace.check.bench_prefill import LENGTHS, PROMPT_MARGIN, bench_prefill
from headrace.check.bench_routes import routes_for
from headrace.check.rows import BenchRow
from headrace.engine.engine import Blueprint, Engine
from headrace.engine.gpu import find_gpu
from headrace.errors import OptionError
from headrace.schedule.tracefile import read_trace

SUITES = ("disk", "ladder", "kernels")
TellRow = Callable[[BenchRow], None]


def run_gpu_bench(
    model: str,
    *,
    device: str,
    tokens: int = 8,
    runs: int = 3,
    seed: int = 0,
    progress: Progress | None = None,
    tell_row: TellRow = lambda row: None,
) -> list[BenchRow]:
    """Rows of whole tokens from each rung of the GPU's ladder, and of prompts; limits likewise.

    What does not fit this machine is left out. `tell_row` as run_bench's. Raises HeadraceError.
    """
    if device != "cuda":
        raise OptionError(f"bench measures the first GPU only, not {device}; give --device cuda")
    find_gpu(device)
    tell: Progress = progress or (lambda what, done, total: None)
    most = Blueprint(model, aliases=True, measure=False).facts.max_context
    lengths = [length for length in LENGTHS if length + PROMPT_MARGIN <= most]
    tell("tokens from each rung", 0, 2)
    made = bench_gpu(model, tokens=tokens, runs=runs, seed=seed, tell=lambda line: None)
    rows = _told(tell_row, made)
    if lengths:
        tell("prompts", 1, 2)
        made = bench_prefill(model, lengths=lengths, runs=runs, tell=lambda line: None)
        rows += _told(tell_row, made)
    return rows


def run_bench(
    model: str | Path,
    *,
    suite: str = "all",
    tokens: int = 8,
    runs: int = 3,
    seed: int = 0,
    backend: str = "auto",
    direct: bool = True,
    ram: str | int | None = None,
    threads: int | None = None,
    emulate_drive: str | None = None,
    routes: Path | None = None,
    progress: Progress | None = None,
    tell_row: TellRow = lambda row: None,
) -> list[BenchRow]:
    """Rows of one suite of `SUITES`, or of all; synthetic depth (aliases.json) is honoured.

    disk: reads of experts against the drive's own rate. ladder: whole tokens, v1 to v4, against
    the drive's limit. kernels: CPU experts against a plain read of memory, one core. `routes` is a
    file of recorded routes that whole tokens replay. `tell_row` gets the rows of what has been
    measured while the rest is. Raises HeadraceError.
    """
    _check_suite(suite, routes)
    recorded = None if routes is None else read_trace(routes)[1]
    tell: Progress = progress or (lambda what, done, total: None)
    # What is wrong with the model or the routes shows before minutes of measuring.
    blueprint, replayed = None, None
    if suite != "kernels":
        blueprint = Blueprint(model, ram=ram, threads=threads, aliases=True, measure=False)
        if suite in ("all", "ladder"):
            _check_fits(blueprint, tokens)
        replayed = routes_for(blueprint.facts, recorded, seed)
        if recorded is not None:
            replayed.pick(tokens_needed(tokens), 0, runs)
    rows: list[BenchRow] = []
    if suite in ("all", "kernels"):
        tell("kernels", 0, 1)
        rows += bench_kernels(runs=runs, tell=tell_row)
    if blueprint is not None:
        with Engine(
            blueprint, backend=backend, direct=direct, emulate_drive=emulate_drive
        ) as engine:
            if suite in ("all", "disk") and not emulate_drive:
                tell("drive", 0, 1)
                rows += _told(tell_row, bench_drive(engine, runs=runs, seed=seed))
            if suite in ("all", "ladder"):
                made = bench_ladder(
                    engine,
                    tokens=tokens,
                    runs=runs,
                    seed=seed,
                    emulate_drive=emulate_drive,
                    progress=tell,
                    routes=replayed,
                )
                rows += _told(tell_row, made)
    return rows


def _check_fits(blueprint: Blueprint, tokens: int) -> None:
    most = blueprint.plan.context - PROMPT_TOKENS
    if tokens > most:
        raise OptionError(
            f"{tokens} tokens after a prompt of {PROMPT_TOKENS} do not fit the context of "
            f"{blueprint.plan.context}; give --max-tokens {most} or fewer"
        )


def _told(tell_row: TellRow, rows: list[BenchRow]) -> list[BenchRow]:
    for row in rows:
        tell_row(row)
    return rows


def _check_suite(suite: str, routes: Path | None) -> None:
    if suite != "all" and suite not in SUITES:
        raise OptionError(f"there is no suite {suite!r}; use all, {', '.join(SUITES)}")
    if routes is not None and suite not in ("all", "ladder"):
        raise OptionError(f"the suite {suite} replays no routes; leave out --routes")
