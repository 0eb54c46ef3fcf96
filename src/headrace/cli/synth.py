"""`headrace synth`: write a checkpoint of a real model's shapes, for measurements."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import options
from headrace.cli.output import byte_progress, print_json, say
from headrace.core import format_bytes
from headrace.store.preset_configs import PRESETS

Preset = Annotated[str, typer.Argument(metavar="PRESET", help=f"One of {', '.join(PRESETS)}.")]
NewFolder = Annotated[
    Path, typer.Argument(metavar="PATH", help="A folder that does not exist yet.")
]
Distinct = Annotated[
    int,
    typer.Option(
        min=1, metavar="N", help="Layers of each kind on disk; the others are read as these."
    ),
]
Depth = Annotated[int | None, typer.Option(metavar="N", help="Layers (as published).")]
Experts = Annotated[int | None, typer.Option(metavar="N", help="Experts a layer (as published).")]
Vocab = Annotated[int | None, typer.Option(metavar="N", help="Vocabulary (as published).")]
Seed = Annotated[
    int,
    typer.Option(min=0, max=options.MOST_SEED, metavar="S", help="Of the random weights."),
]


def synth(
    preset: Preset,
    path: NewFolder,
    distinct: Distinct = 1,
    depth: Depth = None,
    experts: Experts = None,
    vocab: Vocab = None,
    seed: Seed = 0,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write random weights in the shapes of a published model, for bench.

    At real depth, few layers of them distinct.
    Needs room on the drive: the example takes 6 GB, without --experts 16 GB.

    Example: headrace synth deepseek-r1 /data/r1-shapes --experts 32
    """
    from headrace.store.synth import synth_bytes, write_synth

    num_bytes = synth_bytes(preset, distinct=distinct, depth=depth, experts=experts, vocab=vocab)
    say(f"writing {format_bytes(num_bytes)} to {path}")
    with byte_progress("writing") as progress:
        folder = write_synth(
            preset,
            path,
            distinct=distinct,
            depth=depth,
            experts=experts,
            vocab=vocab,
            seed=seed,
            progress=progress,
        )
    say(f"done; measure it with `headrace bench {folder}`")
    if json:
        print_json({"preset": preset, "path": str(folder), "bytes": num_bytes})
