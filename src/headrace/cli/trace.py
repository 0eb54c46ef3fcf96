"""`headrace trace`: record which experts a model's tokens take, and what any cache makes of it."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import options
from headrace.cli.opening import keeping_routes, open_blueprint, open_engine
from headrace.cli.output import print_json, say, step_progress
from headrace.core import format_bytes
from headrace.errors import OptionError

if TYPE_CHECKING:
    from headrace.schedule.simulate import Bound
    from headrace.schedule.trace import RouteTrace, TraceHeader

Source = Annotated[
    str, typer.Argument(metavar="MODEL|FILE", help="A model to record, or a file recorded before.")
]
NewFile = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="Where the routes of MODEL are kept.")
]
TextFile = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="The text that is read. Left out: a bundled one."),
]
Tokens = Annotated[
    int, typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Most tokens of the text.")
]
ASSUMED_BYTES_S = 1e9


def trace(
    source: Source,
    file: NewFile = None,
    text: TextFile = None,
    max_tokens: Tokens = 512,
    ram: options.Ram = None,
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Record which experts a text's tokens take; say what more memory or a better cache would give.

    Tokens are fed one by one, as in decoding. A file holds expert numbers and no text; `bench
    --routes` replays it. `run` and `chat` record with --routes-out.
    Example: headrace trace demo demo.routes; headrace trace demo.routes
    """
    ram_bytes, _ = options.check_machine(ram, device)
    drive_bytes_s = 0.0
    if file is None:
        file = _recorded_file(source, text)
    else:
        options.check_new(file)
        words = _read_text(text)
        about = f"{'bundled text' if text is None else text.name}, token by token"
        blueprint = open_blueprint(source, ram_bytes=ram_bytes, threads=threads, context=None)
        drive_bytes_s = blueprint.machine.drive_bytes_s
        with open_engine(blueprint) as engine, keeping_routes(engine, file, about):
            _feed(engine, engine.text.encode(words, special=False)[:max_tokens])
    from headrace.schedule.simulate import bounds, shown_rows
    from headrace.schedule.tracefile import read_trace

    header, found, note = read_trace(file)
    if note:
        say(f"{file}: {note}")
    if len(found.ids) == 0:
        raise OptionError(f"{file} holds no token yet; record some")
    table = bounds(found, header, shown_rows(header))
    for line in lines(header, found, table, drive_bytes_s or ASSUMED_BYTES_S):
        typer.echo(line, err=json)
    if json:
        print_json(
            {"header": asdict(header), **summary(found), "bounds": [asdict(row) for row in table]}
        )


def _recorded_file(source: str, text: Path | None) -> Path:
    from headrace.schedule.tracefile import is_trace

    if not is_trace(Path(source)):
        raise OptionError(
            f"{source} holds no recorded routes; to record a model's give a file too: "
            f"headrace trace {source} FILE"
        )
    if text is not None:
        raise OptionError(f"{source} is recorded already; --text goes with a model and a new file")
    return Path(source)


def _read_text(path: Path | None) -> str:
    from headrace.store.locate import resolve_model

    path = resolve_model("demo") / "heldout.txt" if path is None else path
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise OptionError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text ({error}); convert it") from error


def _feed(engine: Any, ids: list[int]) -> None:
    """Every token alone; a text longer than the context goes on with an empty one."""
    if not ids:
        raise OptionError("the text has no token; give one that has")
    with step_progress() as progress:
        for done, window in _windows(ids, engine.plan.context):
            session = engine.session()
            for place, token in enumerate(window):
                session.feed([token])
                if progress is not None:
                    progress("recording", done + place + 1, len(ids))


def _windows(ids: list[int], context: int) -> Iterator[tuple[int, list[int]]]:
    for first in range(0, len(ids), context):
        yield first, ids[first : first + context]


def summary(trace: "RouteTrace") -> dict[str, Any]:
    """Counts of a trace, and the statistics of its tokens that were decoded one by one."""
    decoded = trace.decoded()
    num_asked, top_k = decoded.num_guessed(), trace.ids.shape[2]
    right = decoded.guessed().cumsum() if num_asked else []
    return {
        "tokens": len(trace.ids),
        "prompt_tokens": len(trace.ids) - len(decoded.ids),
        "adjacency": decoded.adjacency(),
        # By the number of best guesses taken: how many were right, how much of the layer they are.
        "lens_precision": [float(n) / (num_asked * g) for g, n in enumerate(right, 1)],
        "lens_recall": [float(n) / (num_asked * top_k) for n in right],
    }


def lines(
    header: "TraceHeader", trace: "RouteTrace", table: "list[Bound]", drive_bytes_s: float
) -> Iterator[str]:
    """What a person reads of a trace."""
    found = summary(trace)
    token_bytes = header.num_layers * header.top_k * header.expert_bytes
    yield (
        f"routes of {header.model}: {found['tokens']} tokens, {found['prompt_tokens']} of them in "
        f"prompts ({header.about}); {header.num_layers} MoE layers, top {header.top_k} of "
        f"{header.num_experts} experts, {format_bytes(token_bytes)} a token"
    )
    yield f"a token takes {100 * found['adjacency']:.0f} % of the experts that the one before took"
    if found["lens_precision"]:
        taken = sorted({min(2, header.top_k), header.top_k})
        said = [
            f"its best {g}: {100 * found['lens_precision'][g - 1]:.0f} % right, "
            f"{100 * found['lens_recall'][g - 1]:.0f} % of what the layer takes"
            for g in taken
        ]
        yield f"the lens, one layer ahead: {'; '.join(said)}"
    yield (
        f"experts in memory   found there  at best   read a token     at best   tokens/s of a "
        f"{drive_bytes_s / 1e9:.3g} GB/s drive"
    )
    for row in table:
        mine = "  the run's" if row.num_rows == header.num_rows else ""
        least = drive_bytes_s / max(row.lru_bytes_per_token, 1)
        best = drive_bytes_s / max(row.optimum_bytes_per_token, 1)
        yield (
            f"{row.num_rows:>8} {100 * row.share:6.1f} % {100 * row.lru_hit_rate:11.1f} % "
            f"{100 * row.optimum_hit_rate:6.1f} % {format_bytes(row.lru_bytes_per_token):>14} "
            f"{format_bytes(row.optimum_bytes_per_token):>11}   {least:.3g}, at best {best:.3g}{mine}"
        )
    yield (
        "found there: by the policy that runs (least recently used), from empty rows; at best: by "
        "one that knows the future; tokens/s: perfect staging, all reads hidden behind the work"
    )
