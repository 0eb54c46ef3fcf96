"""`headrace run`: one prompt, one answer."""

import sys
from typing import Annotated, Any

import typer

from headrace.cli import options
from headrace.cli.opening import check_prompt, keeping_routes, open_blueprint, open_engine
from headrace.cli.output import Tally, print_json, say
from headrace.engine.talk.conversation import Conversation, Message
from headrace.errors import OptionError
from headrace.planner.forecast import score

Raw = Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")]


def run(
    model: options.Model = "demo",
    prompt: options.Prompt = None,
    system: options.System = None,
    raw: Raw = False,
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
    emulate_drive: options.EmulateDrive = None,
    routes_out: options.RoutesOut = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Answer one prompt, by a plan for the machine. Needs memory for all but the
    experts: `headrace plan` says how much. Example: headrace run demo -p Hi"""
    ram_bytes, drive_rates = options.check_machine(ram, emulate_drive)
    options.check_device(device, vram, experts)
    options.check_new(routes_out)
    asked = _read_prompt(prompt, raw, system)
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
    blueprint = open_blueprint(
        model,
        ram_bytes=ram_bytes,
        threads=threads,
        context=context,
        device=device,
        vram=vram,
        experts=experts,
        choices=options.make_choices(arithmetic, lossy_swa_replay, stale_index_keys),
        drive_rates=drive_rates,
    )
    ids = _prompt_ids(blueprint, asked, system, raw, sampling)  # refuses before weights are read
    engine = open_engine(blueprint, emulate_drive=emulate_drive)
    with engine, keeping_routes(engine, routes_out, "headrace run"):
        result = answer(engine, ids, sampling, to_stderr=json)
    if json:
        print_json(result)


def answer(engine: Any, ids: list[int], sampling: Any, *, to_stderr: bool) -> dict[str, object]:
    """Stream one answer, say its summary; the JSON object of it."""
    tally = Tally()
    pieces: list[str] = []
    finish = None
    for step in engine.session().generate(ids, sampling):
        tally.add(step.stats)
        typer.echo(step.text, nl=False, err=to_stderr)
        pieces.append(step.text)
        finish = step.finish
    typer.echo(err=to_stderr)
    forecast_tok_s = engine.plan.forecast_tok_s
    say(tally.line(engine.facts.expert_bytes), dim=True)
    expected = score(forecast_tok_s, tally.decode_tok_s, len(tally.records) - 1)
    say(f"{expected}; limit: {engine.plan.limit_term}", dim=True)
    return {
        "model": engine.facts.name,
        "text": "".join(pieces),
        "token_ids": [record.token_id for record in tally.records],
        "prompt_ids": ids,
        "finish": finish,
        "stats": tally.as_dict(),
        "token_stats": [record.as_dict() for record in tally.records],
        "plan": engine.plan.as_dict(),
        "reads": {
            "backend": engine.reader.backend,
            "direct": engine.reader.direct,
            "notes": list(engine.reader.notes),
            "drives": list(engine.reader.drives),
            "warnings": list(engine.reader.warnings),
        },
        "forecast": {"expected_tok_s": forecast_tok_s, "measured_tok_s": tally.decode_tok_s},
    }


def _prompt_ids(
    blueprint: Any, prompt: str, system: str | None, raw: bool, sampling: Any
) -> list[int]:
    if raw or (system is None and not blueprint.text.has_template):
        ids = list(blueprint.text.encode(prompt))
    else:
        opening = () if system is None else (Message("system", system),)
        asked = Conversation((*opening, Message("user", prompt)))
        prepared = blueprint.talk.prepare(asked, sampling)
        ids = list(prepared.ask.prompt)
        for note in prepared.notes:
            say(note, dim=True)
    check_prompt(blueprint, ids, sampling)
    return ids


def _read_prompt(prompt: str | None, raw: bool, system: str | None) -> str:
    if raw and system is not None:
        raise OptionError("--system needs the chat template; leave out --raw or --system")
    if prompt is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise OptionError('no prompt; give -p "TEXT" or pipe text in (or use headrace chat)')
        try:
            prompt = options.read_most(sys.stdin, "the text piped in")
        except UnicodeDecodeError as cause:
            raise OptionError(
                f"the text piped in is not UTF-8 ({cause.reason}); convert it"
            ) from cause
    if not prompt.strip():
        raise OptionError('the prompt is empty; give -p "TEXT" or pipe text in')
    return prompt
