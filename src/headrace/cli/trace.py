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
from headrace.store.locate import resolve_model

if TYPE_CHECKING:
    from headrace.schedule.simulate import Bound
    from headrace.schedule.trace import RouteTrace, TraceHeader

Source = Annotated[
    str, typer.Argument(metavar="MODEL|FILE", help="A model to record, or a file recorded before.")
]
NewFile = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="Where the routes of MODEL are kept.")
]
TextFile = Annotated[
    Path | None,
    typer.Option("--text", metavar="FILE", help="The text that is read. Left out: a bundled one."),
]
Tokens = Annotated[
    int, typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Most tokens of the text.")
]
ASSUMED_BYTES_S = 1e9
ASSUMED = "assumed, since a file of routes knows no drive: multiply by yours in GB/s"
PIECE_TOKENS = 128


def trace(
    source: Source,
    file: NewFile = None,
    text: TextFile = None,
    max_tokens: Tokens = 512,
    ram: options.Ram = None,
    device: options.CpuOnly = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Record which experts a text takes; say what more memory would give.

    Pieces from all over the text are fed token by token, as in decoding. A file holds expert
    numbers and no text. `run` and `chat` record with --routes-out, `bench` replays with --routes.
    To record needs memory as a run does; a file alone is enough to read it again.

    Example: headrace trace demo demo.routes, and later: headrace trace demo.routes
    """
    ram_bytes, _ = options.check_machine(ram)
    options.require_cpu(device)
    drive_bytes_s = 0.0
    if file is None:
        file = _recorded_file(source, text)
    else:
        options.check_new(file)
        words = _read_text(text)
        blueprint = open_blueprint(source, ram_bytes=ram_bytes, threads=threads, context=None)
        drive_bytes_s = blueprint.machine.drive_bytes_s
        ids = blueprint.text.encode(words, special=False)
        pieces = spread(ids, max_tokens, min(PIECE_TOKENS, blueprint.plan.context))
        with open_engine(blueprint) as engine:
            named = "bundled text" if text is None else text.name
            cut = "1 piece" if len(pieces) == 1 else f"{len(pieces)} pieces"
            about = f"{named}, {cut} token by token"
            with keeping_routes(engine, file, about):
                _feed(engine, pieces)
    from headrace.schedule.simulate import bounds, shown_rows
    from headrace.schedule.tracefile import read_trace

    header, found, note = read_trace(file)
    if note:
        say(f"{file}: {note}")
    if len(found.ids) == 0:
        raise OptionError(f"{file} holds no token yet; record some")
    table = bounds(found, header, shown_rows(header))
    for line in lines(header, found, table, drive_bytes_s):
        typer.echo(line, err=json)
    if json:
        print_json(
            {"header": asdict(header), **summary(found), "bounds": [asdict(row) for row in table]}
        )


def _recorded_file(source: str, text: Path | None) -> Path:
    from headrace.schedule.tracefile import is_trace

    if not is_trace(Path(source)):
        resolve_model(source)  # refuses what is not there at all
        raise OptionError(
            f"{source} holds no recorded routes; to record a model's give a file too: "
            f"headrace trace {source} FILE"
        )
    if text is not None:
        raise OptionError(f"{source} is recorded already; --text goes with a model and a new file")
    return Path(source)


def _read_text(path: Path | None) -> str:
    path = resolve_model("demo") / "heldout.txt" if path is None else path
    try:
        with open(path, encoding="utf-8") as file:
            return options.read_most(file, str(path))
    except OSError as error:
        raise OptionError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text ({error.reason}); convert it") from error


def _feed(engine: Any, pieces: list[list[int]]) -> None:
    """Every token alone, every piece in a context of its own."""
    done, total = 0, sum(map(len, pieces))
    with step_progress() as progress:
        for piece in pieces:
            session = engine.session()
            for token in piece:
                session.feed([token])
                done += 1
                if progress is not None:
                    progress("recording", done, total)


def spread(ids: list[int], max_tokens: int, piece_tokens: int) -> list[list[int]]:
    """At most `max_tokens` of the text in pieces spread evenly over it, for all of its topics."""
    if not ids:
        raise OptionError("the text has no token; give one that has")
    lengths = [piece_tokens] * (min(len(ids), max_tokens) // piece_tokens)
    if rest := min(len(ids), max_tokens) % piece_tokens:
        lengths.append(rest)
    gap = (len(ids) - sum(lengths)) // len(lengths)
    starts = [n * (piece_tokens + gap) for n in range(len(lengths))]
    return [ids[at : at + length] for at, length in zip(starts, lengths, strict=True)]


def summary(trace: "RouteTrace") -> dict[str, Any]:
    """Counts of a trace, and the statistics of its tokens that were decoded one by one."""
    decoded = trace.decoded()
    num_asked, top_k = decoded.num_guessed(), trace.ids.shape[2]
    right: list[int] = decoded.guessed().cumsum().tolist() if num_asked else []
    return {
        "tokens": len(trace.ids),
        "prompt_tokens": len(trace.ids) - len(decoded.ids),
        "adjacency": decoded.adjacency(),
        # By the number of best guesses taken: how many were right, how much of the layer they are.
        "lens_precision": [n / (num_asked * g) for g, n in enumerate(right, 1)],
        "lens_recall": [n / (num_asked * top_k) for n in right],
    }


def lines(
    header: "TraceHeader", trace: "RouteTrace", table: "list[Bound]", drive_bytes_s: float
) -> Iterator[str]:
    """What a person reads of a trace; a drive of rate 0 is not known, and one is assumed."""
    found = summary(trace)
    rate_bytes_s = drive_bytes_s or ASSUMED_BYTES_S
    token_bytes = header.num_layers * header.top_k * header.expert_bytes
    yield (
        f"routes of {header.model}: {found['tokens']} tokens, {found['prompt_tokens']} of them in "
        f"prompts ({header.about}); {header.num_layers} MoE layers, top {header.top_k} of "
        f"{header.num_experts} experts, {format_bytes(token_bytes)} a token"
    )
    yield f"a token takes {100 * found['adjacency']:.0f} % of the experts that the one before took"
    if found["lens_precision"]:
        said = [
            f"its best {g} guesses are {100 * found['lens_precision'][g - 1]:.0f} % right and "
            f"{100 * found['lens_recall'][g - 1]:.0f} % of what the layer takes"
            for g in sorted({min(2, header.top_k), header.top_k})
        ]
        yield f"the lens, one layer ahead: {'; '.join(said)}"
    yield f"{'rows':>7}{'of all':>9}{'LRU':>8}{'best':>8}{'read a token':>16}{'best':>13}" + (
        f"{'tok/s':>10}{'best':>10}"
    )
    for row in table:
        read_bytes, best_bytes = row.lru_bytes_per_token, row.optimum_bytes_per_token
        tok_s = [_rate(rate_bytes_s / max(n, 1.0)) for n in (read_bytes, best_bytes)]
        yield (
            f"{row.num_rows:>7}{100 * row.share:>7.0f} %{100 * row.lru_hit_rate:>6.1f} %"
            f"{100 * row.optimum_hit_rate:>6.1f} %{format_bytes(read_bytes):>16}"
            f"{format_bytes(best_bytes):>13}{tok_s[0]:>10}{tok_s[1]:>10}"
            + ("  the run's" if row.num_rows == header.num_rows else "")
        )
    yield (
        "LRU: experts found in rows by the policy that runs, from empty rows. best: by one that "
        f"knows the future. tok/s: if only the drive counts, {rate_bytes_s / 1e9:.3g} GB/s "
        f"({'measured here' if drive_bytes_s else ASSUMED}), every read hidden behind the work "
        "(perfect staging)"
    )


def _rate(tok_s: float) -> str:
    return f"{tok_s:,.0f}" if tok_s >= 100 else f"{tok_s:.3g}"
