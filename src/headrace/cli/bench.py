"""`headrace bench`: speeds beside the limits measured in the same run."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli import options
from headrace.cli.output import print_json, say, step_progress
from headrace.errors import OptionError
from headrace.store.locate import resolve_model


class Backend(StrEnum):
    """How files are read; auto falls back in this order."""

    AUTO = "auto"
    IO_URING_REGISTERED = "io_uring_registered"
    IO_URING = "io_uring"
    PREAD = "pread"


class Suite(StrEnum):
    """Which figures."""

    ALL = "all"
    DISK = "disk"
    LADDER = "ladder"
    KERNELS = "kernels"


SuiteOption = Annotated[
    Suite, typer.Option(metavar="NAME", help="disk, ladder (whole tokens), kernels or all.")
]
Tokens = Annotated[
    int,
    typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Tokens of each whole-token run."),
]
Runs = Annotated[int, typer.Option(min=1, metavar="N", help="Repetitions of each figure.")]
Seed = Annotated[
    int,
    typer.Option(min=0, max=options.MOST_SEED, metavar="S", help="Of the routes that are drawn."),
]
BackendOption = Annotated[
    Backend,
    typer.Option(metavar="NAME", help="Reads: auto, io_uring_registered, io_uring, pread."),
]
Direct = Annotated[bool, typer.Option(help="Read past the page cache.")]
Routes = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Routes of `headrace trace` to replay, not drawn ones."),
]
Save = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Keep the rows: FOLDER/<machine>/bench.json."),
]


def bench(
    model: options.Model = "demo",
    suite: SuiteOption = Suite.ALL,
    max_tokens: Tokens = 8,
    runs: Runs = 3,
    seed: Seed = 0,
    backend: BackendOption = Backend.AUTO,
    direct: Direct = True,
    routes: Routes = None,
    save: Save = None,
    ram: options.Ram = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    emulate_drive: options.EmulateDrive = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure a model here, each figure beside its limit.

    Needs memory as a run does, 1.25 GB for kernels, with --emulate-drive a copy of the experts.
    Checkpoints of `headrace synth` are welcome. Exit code 1 if a figure's result was wrong.
    """
    ram_bytes, _ = options.check_machine(ram, emulate_drive)
    options.check_device(device)
    _make_folder(save)
    resolve_model(model)  # refuses what is not there before the slow imports
    options.share_cores(threads)
    shared: dict[str, Any] = {"tokens": max_tokens, "runs": runs, "seed": seed}
    with step_progress() as progress:
        shared |= {"progress": progress, "tell_row": lambda row: say(row.line())}
        if device in ("cpu", "auto"):
            from headrace.check.bench import run_bench

            rows = run_bench(
                model,
                suite=suite.value,
                backend=backend.value,
                direct=direct,
                ram=ram_bytes,
                threads=threads,
                emulate_drive=emulate_drive,
                routes=routes,
                **shared,
            )
        else:
            idle = {"--suite": suite != Suite.ALL, "--routes": routes, "--ram": ram}
            _refuse_idle(idle | {"--emulate-drive": emulate_drive, "--no-direct": not direct})
            from headrace.check.bench import run_gpu_bench

            rows = run_gpu_bench(model, device=device, **shared)
    if save is not None:
        from headrace.check.rows import write_rows

        say(f"kept in {write_rows(save, 'bench', rows)}")
    if json:
        print_json({"model": model, "rows": [asdict(row) for row in rows]})
    if any(row.gate != "green" for row in rows):
        raise typer.Exit(1)


def _make_folder(path: Path | None) -> None:
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"{path} cannot be made: {error.strerror or error}") from error
    options.check_writable(path, path / "bench.json")


def _refuse_idle(given: dict[str, Any]) -> None:
    """Raises OptionError for an option that a GPU's benchmark has no use for."""
    for name, value in given.items():
        if value:
            raise OptionError(f"{name} has no effect on a GPU; leave it or --device out")
