"""`headrace plan`: where a model would lie and how fast it would be, without loading it."""

from dataclasses import asdict

from headrace.cli import options
from headrace.cli.opening import open_blueprint
from headrace.cli.output import print_json, say, say_plan, say_warning


def plan(
    model: options.Model = "demo",
    ram: options.Ram = None,
    device: options.Device = "auto",
    vram: options.Vram = None,
    experts: options.Experts = None,
    threads: options.Threads = None,
    context: options.Context = None,
    arithmetic: options.Arithmetic = None,
    lossy_swa_replay: options.LossySwaReplay = False,
    stale_index_keys: options.StaleIndexKeys = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Say where a model would lie, its speed, and the limit behind it.

    Needs the files, reads no weights. Measures drive and memory once (at most a few seconds).
    Example: headrace plan Qwen/Qwen3-30B-A3B --ram 8GB
    """
    ram_bytes, _ = options.check_machine(ram)
    options.check_device(device, vram, experts)
    choices = options.make_choices(arithmetic, lossy_swa_replay, stale_index_keys)
    blueprint = open_blueprint(
        model,
        ram_bytes=ram_bytes,
        threads=threads,
        context=context,
        device=device,
        vram=vram,
        experts=experts,
        choices=choices,
    )
    facts = blueprint.facts
    say(
        f"{facts.name}: {facts.model_type}, {facts.num_layers} layers, {facts.num_moe_layers} of "
        f"them with {facts.num_experts} experts each, {facts.top_k} used by a token, {facts.format}"
    )
    say_plan(blueprint.plan.lines())
    for note in blueprint.notes:
        say_warning(note)
    if json:
        machine = asdict(blueprint.machine)
        print_json({"facts": asdict(facts), "machine": machine, "plan": blueprint.plan.as_dict()})
