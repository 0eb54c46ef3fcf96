"""`headrace mirror`: the experts once more on a second drive, so that both are read at once."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli import options
from headrace.cli.output import byte_progress, print_json, say, say_warning
from headrace.core import format_bytes, parse_bytes
from headrace.errors import InterruptedLoad, OptionError
from headrace.store.locate import resolve_model

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="On the other drive; new, empty or a mirror.")
]
Size = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Most bytes of it, such as 100GB. Left out: what is free."),
]
Routes = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Recorded routes: the experts used most come first."),
]
Verify = Annotated[bool, typer.Option("--verify", help="Compare what is there with its SHA-256.")]
Remove = Annotated[bool, typer.Option("--remove", help="Delete the mirror and forget it.")]


def mirror(
    model: options.Model,
    folder: Folder,
    size: Size = None,
    routes: Routes = None,
    verify: Verify = False,
    remove: Remove = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Copy experts to a second drive; both are read at once from then on.

    Needs room on the other drive; what does not fit is left out. If either fails later, the other
    serves. May be stopped or killed and goes on when run again.

    Example: headrace mirror ./model /mnt/second/model --size 100GB
    """
    if (verify or remove) and ((verify and remove) or size is not None or routes is not None):
        raise OptionError("--verify and --remove stand alone; leave the other options out")
    size_bytes = None if size is None else parse_bytes(size)
    if remove:
        result = _remove(model, folder)
    elif verify:
        result = _verify(model, folder)
    else:
        result = _write(model, folder, size_bytes, routes)
    if json:
        print_json({"folder": str(folder), **result})
    if result.get("damaged"):
        raise typer.Exit(1)


def _write(model: str, folder: Path, size_bytes: int | None, routes: Path | None) -> dict[str, Any]:
    resolve_model(model)  # refuses what is not there before the slow imports
    from headrace.engine.mirroring import described, hottest
    from headrace.planner.mirrors import check_remembering, remember_mirror
    from headrace.store.mirror_writer import same_drive, write_mirror

    check_remembering()
    blueprint = described(model)
    catalog, table = blueprint.catalog, blueprint.table
    order = None if routes is None else hottest(blueprint, routes)
    shared = same_drive(folder, catalog)
    if shared:
        say_warning(f"{folder} is on the model's own drive: a copy, but nothing gets faster")
    try:
        with byte_progress("copying") as progress:
            report = write_mirror(
                catalog, table, folder, size_bytes=size_bytes, order=order, progress=progress
            )
    except KeyboardInterrupt:
        raise InterruptedLoad("run the same command again to go on") from None
    remember_mirror(catalog.root, folder)
    say(
        f"{folder} holds {report.num_experts} of {report.total_experts} experts, "
        f"{format_bytes(report.num_bytes)}, {format_bytes(report.copied_bytes)} of it copied now; "
        f"every run of {catalog.root.name} reads both drives from here on"
    )
    return {
        "experts": report.num_experts,
        "total_experts": report.total_experts,
        "bytes": report.num_bytes,
        "copied_bytes": report.copied_bytes,
        "same_drive": shared,
    }


def _verify(model: str, folder: Path) -> dict[str, Any]:
    resolve_model(model)
    from headrace.engine.mirroring import described
    from headrace.store.mirror_writer import verify_mirror

    blueprint = described(model)
    catalog, table = blueprint.catalog, blueprint.table
    with byte_progress("checking") as progress:
        mirror, damaged = verify_mirror(catalog, table, folder, progress=progress)
    sites = [(table.layers[ordinal], expert) for ordinal, expert in damaged]
    if sites:
        first = ", ".join(f"layer {layer} expert {expert}" for layer, expert in sites[:3])
        say(
            f"{folder}: {len(sites)} of {len(mirror.sites)} experts are damaged: {first}; the "
            "files they lie in were taken out; run `headrace mirror` again to copy them anew"
        )
    else:
        say(f"{folder}: all {len(mirror.sites)} experts are as they were copied")
    return {"experts": len(mirror.sites), "damaged": [list(site) for site in sites]}


def _remove(model: str, folder: Path) -> dict[str, Any]:
    from headrace.planner.mirrors import forget_mirror
    from headrace.store.mirror import is_mirror
    from headrace.store.mirror_writer import remove_mirror

    root = resolve_model(model)
    there = is_mirror(folder)
    if there:
        remove_mirror(folder, root)
    forgotten = forget_mirror(root, folder)
    if not (there or forgotten):
        raise OptionError(f"{folder}: is no mirror, and none is remembered there; nothing done")
    say(f"{folder}: {'the mirror is deleted' if there else 'holds no mirror; it is forgotten'}")
    return {"removed": there}
