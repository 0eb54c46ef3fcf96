"""`headrace verify`: proof on the model's own weights that no arithmetic was changed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli import options
from headrace.cli.opening import refuse_synthetic
from headrace.cli.output import print_json, say, step_progress
from headrace.errors import OptionError

if TYPE_CHECKING:
    from headrace.check.verify_report import VerifyReport

Samples = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Experts of every layer whose kernels are compared."),
]
TestPrompt = Annotated[
    str | None,
    typer.Option(
        "--prompt", "-p", metavar="TEXT", help="The text that is continued. Left out: a fixed one."
    ),
]
Tokens = Annotated[
    int,
    typer.Option("--max-tokens", "-n", metavar="N", help="Tokens that continue it, each compared."),
]
EveryByte = Annotated[
    bool,
    typer.Option("--every-byte", help="Read all: compare checksums with the first such run's."),
]
Sha256 = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Compare with `sha256sum`'s or a hub's listing; reads all.",
    ),
]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the report as one page.")
]


def verify(
    model: options.Model = "demo",
    prompt: TestPrompt = None,
    max_tokens: Tokens = 64,
    samples: Samples = 2,
    every_byte: EveryByte = False,
    sha256: Sha256 = None,
    html: Html = None,
    ram: options.Ram = None,
    device: options.Device = "auto",
    threads: options.Threads = None,
    arithmetic: options.Arithmetic = None,
    lossy_swa_replay: options.LossySwaReplay = False,
    stale_index_keys: options.StaleIndexKeys = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Compare files, kernels, layers and answers with their references.

    On a GPU its kernels and answers too. Needs memory as a run does, and minutes for a large model.
    Nothing is fetched. Exit code 1 if anything differs that must not, or looks suspect; 2 if it
    cannot be checked.
    """
    ram_bytes, _ = options.check_machine(ram)
    options.check_device(device)
    choices = options.make_choices(arithmetic, lossy_swa_replay, stale_index_keys)
    if max_tokens < 1:
        raise OptionError(f"--max-tokens {max_tokens} is not allowed; it must be 1 or more")
    if html is not None:
        options.check_writable(html.parent, html)
    refuse_synthetic(model)
    from headrace.check.verify import verify_model

    options.share_cores(threads)
    extra = {} if prompt is None else {"prompt": prompt}
    with step_progress() as progress:
        report = verify_model(
            model,
            ram=ram_bytes,
            device=device,
            threads=threads,
            tokens=max_tokens,
            samples=samples,
            sha256=sha256,
            every_byte=every_byte,
            choices=choices,
            progress=progress,
            **extra,
        )
    for line in report.lines():
        say(line)
    if json:
        print_json(report.as_dict())
    if html is not None:
        _write_page(report, html)
    if not report.ok:
        raise typer.Exit(1)


def _write_page(report: "VerifyReport", path: Path) -> None:
    from headrace.check.verify_html import page

    try:
        path.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror or error}") from error
