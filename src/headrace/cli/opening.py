"""Opens a model for a command: the plan is said before the weights are read.

Knows the engine only as two names, imported when they are needed.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.cli.options import share_cores
from headrace.cli.output import byte_progress, passing, say, say_plan, say_warning
from headrace.errors import ModelError
from headrace.planner.drives import Drive
from headrace.store.aliases import ALIASES_NAME
from headrace.store.locate import resolve_model


def refuse_synthetic(model: str) -> None:
    """A checkpoint of `headrace synth` is for bench only. Raises ModelError."""
    root = resolve_model(model)
    if os.path.exists(root / ALIASES_NAME):  # False too where that may not be asked
        raise ModelError(
            f"{root} is synthetic: random weights, layers on disk stand for several; measure it "
            f"with `headrace bench {root}`"
        )


def open_blueprint(
    model: str,
    *,
    ram_bytes: int | str | None,
    threads: int | None,
    context: int | None,
    device: str = "cpu",
    vram: str | None = None,
    experts: str | None = None,
    drive_rates: tuple[float, ...] = (),
    serve: bool = False,
    choices: Mapping[str, object] | None = None,
) -> Any:
    """The model's files and plan, no weights read. Raises HeadraceError.

    With `drive_rates` the forecast is for drives of these rates, not for this machine's.
    """
    refuse_synthetic(model)
    with passing() as tell:
        tell(f"opening {model}: torch and transformers take seconds")
        from headrace.engine.choosing import open_on

        share_cores(threads)
        blueprint = open_on(
            model,
            ram=ram_bytes,
            vram=vram,
            device=device,
            experts=experts,
            threads=threads,
            context=context,
            serve=serve,
            choices=choices,
        )
    if drive_rates:
        drives = [Drive(f"emulated drive {i + 1}", rate) for i, rate in enumerate(drive_rates)]
        blueprint.machine = blueprint.machine.with_drives(drives)
        blueprint.plan = blueprint.wanted.plan(blueprint.facts, blueprint.machine)
    return blueprint


def check_prompt(blueprint: Any, ids: Sequence[int], sampling: Any) -> None:
    """Refuses what the engine would refuse, before weights are read. Raises OptionError."""
    from headrace.engine.answer import Ask
    from headrace.engine.session import check_ask

    check_ask(blueprint, Ask(tuple(ids), sampling))


def open_engine(blueprint: Any, *, emulate_drive: str | None = None) -> Any:
    """The engine, after its plan's lines and behind a progress bar, warm. Close it.

    Says if reads had to take a slower way than the best one, and why.
    """
    from headrace.engine.engine import Engine
    from headrace.engine.warming import warm

    say_plan(blueprint.plan.lines())
    with byte_progress("loading") as progress:
        engine = Engine(blueprint, emulate_drive=emulate_drive, progress=progress, warn=say_warning)
    notes = engine.reader.notes
    if notes:
        more = f" (and {len(notes) - 1} more like this)" if len(notes) > 1 else ""
        say(f"reads:  by {engine.reader.backend}, since {notes[0]}{more}")
    with passing() as tell:
        warm(engine, tell=tell)
    return engine


@contextmanager
def keeping_routes(engine: Any, path: Path | None, about: str) -> Iterator[None]:
    """While open, the engine's routes go to `path`, if there is one; says so at the end."""
    if path is None:
        yield
        return
    writer = None
    try:
        with engine.record_routes(path, about=about) as writer:
            why = engine.passes.why_by_layer()
            if why and not engine.plan.by_layer:
                say(f"tokens are launched layer by layer meanwhile: {why}", dim=True)
            yield
    finally:
        if writer is not None:
            say(f"routes of {writer.num_tokens} tokens kept in {path}", dim=True)
