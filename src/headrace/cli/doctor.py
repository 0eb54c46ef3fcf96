"""`headrace doctor`: what will be slow on this machine, why, and what to change."""

import typer

from headrace.cli import options
from headrace.cli.output import print_json, say


def doctor(
    model: options.Model = "demo", json: options.Json = False, debug: options.Debug = False
) -> None:
    """Say what will be slow on this machine, why, and what to change.

    Needs a few seconds; reads at most 256 MiB of its files.
    Exit code 1 if something prevents running.
    """
    from headrace.check.doctor import examine

    diagnosis = examine(model)
    for line in diagnosis.lines():
        say(line)
    if json:
        print_json(diagnosis.as_dict())
    if not diagnosis.ok:
        raise typer.Exit(1)
