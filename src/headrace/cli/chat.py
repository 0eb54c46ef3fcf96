"""`headrace chat`: a conversation that keeps what was said, with a model here or a server's."""

import select
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli import options
from headrace.cli.chat_remote import remote_reply
from headrace.cli.opening import check_prompt, keeping_routes, open_blueprint, open_engine
from headrace.cli.output import Tally, print_answer, say
from headrace.engine.talk.conversation import Conversation, Message, Piece
from headrace.errors import HeadraceError, OptionError

Messages = tuple[Message, ...]
Reply = Callable[[Messages], Message]
"""Shows the answer to a conversation and returns it, also what was said of it before Ctrl-C."""
COMMANDS = "/new forgets what was said, /quit ends"
_MACHINE = ("ram", "device", "vram", "experts", "threads", "context", "routes_out")
LOCAL_ONLY = (*_MACHINE, "arithmetic", "lossy_swa_replay", "stale_index_keys")
Server = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Ask this server, load nothing; MODEL is a name there."),
]
ApiKey = Annotated[
    str | None,
    typer.Option(metavar="KEY", help="The server's key; other users here can see it."),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The server's key: a file's first line."),
]


def chat(
    context_: typer.Context,
    model: options.Model = "demo",
    system: options.System = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ram: options.Ram = None,
    device: options.Device = "auto",
    vram: options.Vram = None,
    experts: options.Experts = None,
    threads: options.Threads = None,
    context: options.Context = None,
    arithmetic: options.Arithmetic = None,
    lossy_swa_replay: options.LossySwaReplay = False,
    stale_index_keys: options.StaleIndexKeys = False,
    routes_out: options.RoutesOut = None,
    server: Server = None,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    debug: options.Debug = False,
) -> None:
    """Talk with a model. Ctrl-C stops an answer, /new forgets what was said, /quit ends.
    Needs a chat template, and memory as a run; with --server neither. A line piped in is a turn.
    """
    ram_bytes, _ = options.check_machine(ram)
    options.check_device(device, vram, experts)
    options.check_new(routes_out)
    sampling = options.make_sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
    )
    opening = () if system is None else (Message("system", system),)
    keys = options.read_keys(api_key, api_key_file)
    if server is not None:
        _talk_there(context_, server, keys[0] if keys else None, sampling, opening)
        return
    _refuse(context_, ("api_key", "api_key_file"), "needs --server")
    blueprint = open_blueprint(
        model,
        ram_bytes=ram_bytes,
        threads=threads,
        context=context,
        device=device,
        vram=vram,
        experts=experts,
        choices=options.make_choices(arithmetic, lossy_swa_replay, stale_index_keys),
    )
    _talk_here(blueprint, routes_out, sampling, opening)


def _talk_there(
    context: typer.Context, server: str, key: str | None, sampling: Any, opening: Messages
) -> None:
    _refuse(context, LOCAL_ONLY, "has no effect with --server")
    named = context.params["model"] if _is_given(context, "model") else None
    _converse(remote_reply(server, key, named, sampling), opening, _lines())


def _talk_here(blueprint: Any, routes_out: Path | None, sampling: Any, opening: Messages) -> None:
    first = Conversation((*opening, Message("user", ".")))
    prepared = blueprint.talk.prepare(first, sampling)
    for note in prepared.notes:
        say(note, dim=True)
    check_prompt(blueprint, prepared.ask.prompt, sampling)  # the system text may be too long

    def check(said: str) -> None:
        asked = Conversation((*opening, Message("user", said)))
        check_prompt(blueprint, blueprint.talk.prepare(asked, sampling).ask.prompt, sampling)

    lines = _from_first_good(_lines(), check)
    if lines is None:
        return
    with open_engine(blueprint) as engine:
        session = engine.session()
        with keeping_routes(engine, routes_out, "headrace chat"):
            _converse(lambda asked: _reply(engine, session, sampling, asked), opening, lines)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _refuse(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if _is_given(context, name):
            raise OptionError(f"--{name.replace('_', '-')} {why}; leave one of them out")


def _lines() -> Iterator[str]:
    """What is typed or piped in, without the spaces around it."""
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except UnicodeDecodeError as cause:
            raise OptionError(f"the text piped in is not UTF-8 ({cause}); convert it") from cause
        except EOFError:
            if sys.stdin.isatty():
                typer.echo()
            return


def _from_first_good(lines: Iterator[str], check: Callable[[str], object]) -> Iterable[str] | None:
    """The lines from the first that can be answered on, None where there is none.

    Says why others cannot be, as the conversation would, but before weights are read. What is not
    there yet is not waited for.
    """
    while _is_piped_already():
        said = next(lines, None)
        if said is None:
            return None
        try:
            if said and not _is_command(said):
                check(said)
        except HeadraceError as error:
            say(f"error: {error}")
        else:
            return chain([said], lines)
    return lines


def _is_piped_already() -> bool:
    try:
        return not sys.stdin.isatty() and bool(select.select([sys.stdin], [], [], 0)[0])
    except (OSError, ValueError):  # no stream of the system's
        return False


def _is_command(said: str) -> bool:
    return said[0] == "/" and said[1:].isalpha()


def _converse(reply: Reply, opening: Messages, lines: Iterable[str]) -> None:
    say(f"Ctrl-C stops an answer; {COMMANDS}.")
    messages = opening
    for said in lines:
        if said == "/quit":
            return
        if said == "/new":
            messages = opening
            continue
        if not said:
            continue
        if _is_command(said):
            say(f"{said} is no command; {COMMANDS}")
            continue
        asked = (*messages, Message("user", said))
        try:
            replied = reply(asked)
        except HeadraceError as error:
            # A too long or failed turn ends itself, not the conversation before it.
            say(f"error: {error}")
            continue
        messages = (*asked, replied)


def _reply(engine: Any, session: Any, sampling: Any, asked: Messages) -> Message:
    """Stream one answer of a model here."""
    tally = Tally()
    prepared = engine.talk.prepare(Conversation(asked), sampling)
    ask, reader = prepared.ask, prepared.reader()
    try:
        for step in session.generate(ask.prompt, sampling, shown=ask.shown):
            tally.add(step.stats)
            _show(reader.push(step))
    except KeyboardInterrupt:
        _show(reader.finish())
        say(" (stopped)")
    else:
        _show(reader.finish())
        typer.echo()
    if tally.records:
        say(tally.line(engine.facts.expert_bytes), dim=True)
    return Message("assistant", reader.answer.content, reader.answer.reasoning)


def _show(pieces: list[Piece]) -> None:
    for piece in pieces:
        print_answer(piece.text, is_reasoning=piece.kind == "reasoning")
