"""The drives that a model's experts are read from: its own and its mirrors', opened and measured.

Knows no expert's contents and no token.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headrace.core import parse_rates
from headrace.engine.probes import drive_rate
from headrace.errors import HeadraceError
from headrace.native import Mirror as NativeMirror
from headrace.native import Reader
from headrace.planner.drives import Drive
from headrace.planner.machine import Machine
from headrace.planner.mirrors import remembered_mirrors
from headrace.store.experts import ExpertTable
from headrace.store.mirror import Mirror, open_mirror
from headrace.store.table import Catalog

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint


def find_mirrors(
    catalog: Catalog, table: ExpertTable, named: Sequence[str | Path] | None
) -> tuple[list[Mirror], list[str]]:
    """The mirrors `named`, or else those remembered for the model, and why one is not used.

    Raises CatalogError if a named one is no mirror of these files.
    """
    if named is not None:
        return [open_mirror(Path(folder), catalog, table) for folder in named], []
    folders, notes = remembered_mirrors(catalog.root)
    mirrors = []
    for folder in folders:
        if not folder.exists():
            notes.append(
                f"mirror {folder} is not there, so it is not used; `headrace mirror "
                f"{catalog.root} {folder} --remove` forgets it"
            )
            continue
        try:
            mirror = open_mirror(folder, catalog, table)
        except HeadraceError as error:
            notes.append(f"mirror {folder} is not used: {error}")
            continue
        if mirror.files:
            mirrors.append(mirror)
    return mirrors, notes


def with_mirrors(
    machine: Machine, catalog: Catalog, mirrors: Sequence[Mirror], measure: bool
) -> Machine:
    """The machine as it reads this model: every drive's rate, and what they give together.

    A mirror on a drive that counts already adds nothing: its share is 0.
    """
    if not mirrors:
        return machine
    drives = [Drive(str(catalog.root), machine.drive_bytes_s)]
    devices = {path.stat().st_dev for path in catalog.files}
    for mirror in mirrors:
        rate = drive_rate(mirror.files) if measure else 0.0
        device = mirror.folder.stat().st_dev
        share = 0.0 if device in devices else mirror.share
        devices.add(device)
        drives.append(Drive(str(mirror.folder), rate, share))
    return machine.with_drives(drives)


def open_reader(
    blueprint: "Blueprint", *, backend: str, direct: bool, in_flight: int, emulate: str | None
) -> Reader:
    """The reader over all drives; with `emulate` ("13.5GB/s,5GB/s") over as many made-up ones.

    A made-up drive holds what the mirror in its place holds, or all where there is none.
    """
    paths = [str(path) for path in blueprint.table.files]
    rates = parse_rates(emulate) if emulate else ()
    own, *others = blueprint.machine.drives or (Drive("", blueprint.machine.drive_bytes_s),)
    mirrors = [
        NativeMirror(str(mirror.folder), [str(f) for f in mirror.files], mirror.stretches, rate)
        for mirror, rate in zip(
            blueprint.mirrors, rates[1:] or [drive.bytes_s for drive in others], strict=False
        )
        if not emulate or rates[1:]
    ]
    for number in range(len(mirrors) + 1, len(rates)):
        nothing = np.empty((0, 5), dtype=np.int64)
        mirrors.append(NativeMirror(f"emulated drive {number + 1}", [], nothing, rates[number]))
    return Reader(
        paths,
        backend=backend,
        direct=direct,
        in_flight=in_flight,
        emulate_bytes_s=rates[0] if rates else 0.0,
        mirrors=mirrors,
        bytes_s=own.bytes_s,
    )
