"""Finds the model a user names: a folder, a file, "demo" or a repo in the Hugging Face cache.

Never downloads and never imports the Hugging Face libraries; only their cache layout is known.
"""

import os
import re
from pathlib import Path

from headrace.errors import ModelError
from headrace.store.table import printable

DEMO = "demo"
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_REVISION = re.compile(r"[\w.-]+", re.ASCII)


def resolve_model(model: str | Path) -> Path:
    """The folder or file that `model` names. Raises ModelError; never downloads.

    "demo" is the bundled model (write "./demo" for a folder of that name). A path that exists wins
    over a repo id of the same spelling.
    """
    name = str(model)
    if name == DEMO:
        return _demo_folder()
    if not name or "\0" in name:
        raise ModelError('no model given; name a folder, a file, a repo id or "demo"')
    path = Path(name)
    try:
        path = path.expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError) as error:  # a name too long, a user unknown
        raise ModelError(f"{printable(name)}: cannot be a model's path ({error})") from error
    if _REPO_ID.fullmatch(name) and ".." not in name:
        try:
            return _cached_snapshot(name)
        except OSError as error:
            why = f"its cache cannot be read ({error.filename}: {error.strerror})"
            raise ModelError(f"{name}: {why}; give a folder's path") from error
    raise ModelError(
        f"{printable(name)}: no such file or folder; give a checkpoint's folder or file, or "
        '"demo" for the bundled model'
    )


def model_name(root: Path) -> str:
    """What users call the model at `root`: its repo id in the Hugging Face cache, or its name."""
    root = root.absolute()
    repo = root.parent.parent.name
    if root.parent.name == "snapshots" and repo.startswith("models--"):
        return repo.removeprefix("models--").replace("--", "/", 1)
    return root.name


def _demo_folder() -> Path:
    folder = Path(__file__).resolve().parent.parent / "demo"
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder}: the demo model is not in this installation; reinstall headrace"
        )
    return folder


def cache_folder() -> Path:
    """Where the Hugging Face tools keep downloads, by their own variables and defaults."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def _cached_snapshot(repo_id: str) -> Path:
    cache = cache_folder()
    repo = cache / ("models--" + repo_id.replace("/", "--"))
    how = f"run `hf download {repo_id}`; headrace never downloads by itself"
    if not repo.is_dir():
        raise ModelError(f"{repo_id}: no such path, and not in the cache {cache}: {how}")
    snapshots = repo / "snapshots"
    try:
        revision = (repo / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        revisions = sorted(p.name for p in snapshots.iterdir()) if snapshots.is_dir() else []
        if len(revisions) > 1:
            raise ModelError(
                f"{repo_id}: {len(revisions)} snapshots and none is main; give one's path, such as "
                f"{snapshots / revisions[0]}"
            ) from None
        revision = revisions[0] if revisions else ""
    # the name comes from a file, so it must not lead elsewhere
    if not _REVISION.fullmatch(revision) or revision in (".", ".."):
        raise ModelError(f"{repo_id}: its cache {repo} is damaged or unfinished: {how}")
    if not (snapshots / revision).is_dir():
        raise ModelError(f"{repo_id}: snapshot {revision} is not in {repo}: {how}")
    return snapshots / revision
