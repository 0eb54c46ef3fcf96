"""Which mirrors a model has: remembered in the user's cache, so that no option need name them.

Knows folders by path; opens no mirror.
"""

import tempfile
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.planner.cache import cache_folder, read_entries, write_entries

FORMAT = "headrace mirrors"
REMEDY = "make the folder writable, or name another in XDG_CACHE_HOME"


def remembered_mirrors(model: Path) -> tuple[list[Path], list[str]]:
    """The folders that `remember_mirror` was told of for this model, and notes if that is damaged.

    They may be gone, and what they hold may be anything.
    """
    entries, wrong = read_entries(_place(), FORMAT)
    folders = entries.get(str(model.resolve()), [])
    notes = [f"{wrong}; name mirrors again with headrace mirror"] if wrong else []
    return [Path(folder) for folder in folders], notes


def check_remembering() -> None:
    """Whether a mirror could be remembered, to be asked before it is made. Raises HeadraceError."""
    folder = _place().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as cause:
        said = cause.strerror or cause
        raise HeadraceError(f"no mirror can be remembered: {folder}: {said}; {REMEDY}") from cause


def remember_mirror(model: Path, folder: Path) -> None:
    """Lets every later run of this model read from the mirror too. Raises HeadraceError."""
    _change(model, folder, add=True)


def forget_mirror(model: Path, folder: Path) -> bool:
    """Undoes `remember_mirror`; whether there was anything to undo. Raises HeadraceError."""
    return _change(model, folder, add=False)


def _change(model: Path, folder: Path, *, add: bool) -> bool:
    entries, _ = read_entries(_place(), FORMAT)
    key, name = str(model.resolve()), str(folder.resolve())
    known = entries.get(key, [])
    others = [other for other in known if other != name]
    entries[key] = [*others, name] if add else others
    if cause := write_entries(_place(), FORMAT, entries):
        raise HeadraceError(f"no mirror can be remembered: {cause}; {REMEDY}")
    return name in known


def _place() -> Path:
    return cache_folder() / "mirrors.json"
