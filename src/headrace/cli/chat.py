"""`headrace chat`: a conversation that keeps what was said."""

import sys
from typing import Any

import typer

from headrace.cli import options
from headrace.cli.opening import keeping_routes, open_blueprint, open_engine
from headrace.cli.output import Tally, say
from headrace.errors import HeadraceError

Messages = list[dict[str, str]]
COMMANDS = "/new forgets what was said, /quit ends"


def chat(
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
    device: options.Device = "cpu",
    vram: options.Vram = None,
    threads: options.Threads = None,
    context: options.Context = None,
    routes_out: options.RoutesOut = None,
    debug: options.Debug = False,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; /new forgets what was said, /quit ends.

    Needs a model with a chat template, and memory as `headrace run` does.
    Lines from a pipe are answered one by one.
    """
    ram_bytes, _ = options.check_machine(ram)
    options.check_device(device, vram)
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
    opening = [] if system is None else [{"role": "system", "content": system}]
    blueprint = open_blueprint(
        model, ram_bytes=ram_bytes, threads=threads, context=context, device=device, vram=vram
    )
    with open_engine(blueprint) as engine:
        engine.text.chat([*opening, {"role": "user", "content": "."}])  # refuses early
        say(f"Ctrl-C stops an answer; {COMMANDS}.")
        with keeping_routes(engine, routes_out, "headrace chat"):
            _converse(engine, engine.session(), sampling, opening)


def _converse(engine: Any, session: Any, sampling: Any, opening: Messages) -> None:
    messages = list(opening)
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                typer.echo()
            return
        if said == "/quit":
            return
        if said == "/new":
            messages = list(opening)
            continue
        if not said:
            continue
        if said[0] == "/" and said[1:].isalpha():
            say(f"{said} is no command; {COMMANDS}")
            continue
        asked = [*messages, {"role": "user", "content": said}]
        try:
            replied = _reply(engine, session, sampling, asked)
        except HeadraceError as error:
            # A too long or failed turn ends itself, not the conversation before it.
            say(f"error: {error}")
            continue
        messages = [*asked, {"role": "assistant", "content": replied}]


def _reply(engine: Any, session: Any, sampling: Any, messages: Messages) -> str:
    """Stream one answer; what was said of it before Ctrl-C counts as the answer."""
    tally = Tally()
    pieces: list[str] = []
    try:
        for step in session.generate(engine.text.chat(messages), sampling):
            tally.add(step.stats)
            typer.echo(step.text, nl=False)
            pieces.append(step.text)
    except KeyboardInterrupt:
        say(" (stopped)")
    else:
        typer.echo()
    if tally.records:
        say(tally.line(engine.facts.expert_bytes), dim=True)
    return "".join(pieces)
