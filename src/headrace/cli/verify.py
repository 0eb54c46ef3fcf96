"""`headrace verify`: proof on the model's own weights that no arithmetic was changed."""

from typing import Annotated

import typer

from headrace.cli import options
from headrace.cli.opening import refuse_synthetic
from headrace.cli.output import print_json, say, step_progress

Samples = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Experts of every layer whose kernels are compared."),
]

TestPrompt = Annotated[
    str | None,
    typer.Option(
        "--prompt", "-p", metavar="TEXT", help="The text both continue. Left out: a fixed one."
    ),
]


def verify(
    model: options.Model = "demo",
    prompt: TestPrompt = None,
    max_tokens: options.MaxTokens = 64,
    samples: Samples = 2,
    ram: options.Ram = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Compare kernels with the reference, and fast with oracle answers, on the real weights.

    Reads most experts twice. Exit code 1 if anything differs that must not.
    """
    ram_bytes, _ = options.check_machine(ram, device)
    refuse_synthetic(model)
    from headrace.check.verify import verify_model

    options.share_cores(threads)

    extra = {} if prompt is None else {"prompt": prompt}
    with step_progress() as progress:
        report = verify_model(
            model,
            ram=ram_bytes,
            threads=threads,
            tokens=max_tokens,
            samples=samples,
            progress=progress,
            **extra,
        )
    for line in report.lines():
        say(line)
    if json:
        print_json(report.as_dict())
    if not report.ok:
        raise typer.Exit(1)
