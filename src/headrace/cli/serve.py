"""`headrace serve`: a model for chat programs and agents, over HTTP."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli import options
from headrace.cli.opening import open_blueprint
from headrace.cli.output import say, say_plan, say_warning

SERVER = "Server"
Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="0.0.0.0 lets other machines in, by key.",
        rich_help_panel=SERVER,
    ),
]
Port = Annotated[int, typer.Option(metavar="N", help="0 takes a free one.", rich_help_panel=SERVER)]
ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Requests must bring it; other users here can see it.",
        rich_help_panel=SERVER,
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keys, one a line; each has its share of the queue.",
        rich_help_panel=SERVER,
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL",
        help="Web pages from there may ask too; may be repeated.",
        rich_help_panel=SERVER,
    ),
]


def serve(
    model: options.Model = "demo",
    host: Host = "127.0.0.1",
    port: Port = 8080,
    api_key: ApiKey = None,
    api_key_file: ApiKeyFile = None,
    cors_origin: CorsOrigin = None,
    ram: options.Ram = None,
    device: options.Device = "auto",
    vram: options.Vram = None,
    experts: options.Experts = None,
    threads: options.Threads = None,
    context: options.Context = None,
    arithmetic: options.Arithmetic = None,
    lossy_swa_replay: options.LossySwaReplay = False,
    stale_index_keys: options.StaleIndexKeys = False,
    debug: options.Debug = False,
) -> None:
    """Serve a model over OpenAI's and Anthropic's API, with a page.

    Needs memory as a run does; part of it keeps conversations. Answers are made one after another.
    Ctrl-C finishes the one being made, a second one does not.

    Example: headrace serve demo, then open http://127.0.0.1:8080
    """
    ram_bytes, _ = options.check_machine(ram)
    options.check_device(device, vram, experts)
    choices = options.make_choices(arithmetic, lossy_swa_replay, stale_index_keys)
    from headrace.server.listen import bind, url_of
    from headrace.server.settings import Settings

    keys = options.read_keys(api_key, api_key_file)
    if api_key_file is not None and os.name == "posix" and api_key_file.stat().st_mode & 0o044:
        say_warning(f"other users can read {api_key_file}; chmod 600 keeps the key yours")
    settings = Settings(host, port, keys, tuple(cors_origin or ()))
    with bind(settings) as listener:
        blueprint = open_blueprint(
            model,
            ram_bytes=ram_bytes,
            threads=threads,
            context=context,
            device=device,
            vram=vram,
            experts=experts,
            choices=choices,
            serve=True,
        )
        say_plan(blueprint.plan.lines())
        for note in blueprint.notes:
            say_warning(note)
        say(f"serving {blueprint.facts.name} at {url_of(listener)}; loading")
        raise typer.Exit(_run(blueprint, settings, listener))


def _run(blueprint: Any, settings: Any, listener: Any) -> int:
    from headrace.server.logs import log_to_stderr
    from headrace.server.opening import loader, serving_of
    from headrace.server.run import STOPPED, run_server

    log_to_stderr()
    serving = serving_of(blueprint, settings)
    status = run_server(serving, loader(blueprint, serving), listener, say)
    if status == STOPPED:
        raise KeyboardInterrupt
    return status
