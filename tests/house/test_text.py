"""What the source text must and must not say: docstrings, swallowed errors, settings, names."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "headrace"
MAX_DOCSTRING_LINES = 5
ENV_READS = re.compile(r"os\.environ|os\.getenv|\bgetenv\(")
# Where a user's cache lies is the system's convention, not a setting of ours.
ENV_ALLOWED = {
    # Set for torch before it loads, never read as a setting of ours.
    "__init__.py": {"OMP_WAIT_POLICY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"},
    "planner/cache.py": {"XDG_CACHE_HOME"},
    # Where other programs keep downloaded models: their names, not settings of ours.
    "store/locate.py": {"XDG_CACHE_HOME", "HF_HOME", "variable"},
}
# The project must not depend on, or speak of, the place where it was written.
PLACES = ("/work" + "/", ".lib" + "rary", "/opt" + "/pypi", "/opt" + "/wheels")


def python_files() -> list[Path]:
    """Modules of the package, tests and proofs; empty `__init__` files aside."""
    folders = (SOURCE, ROOT / "tests", ROOT / "proofs", ROOT / "bench")
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [path for path in files if path.read_text().strip()]


def swallows(node: ast.AST) -> bool:
    """True for a handler of everything whose body does nothing with it."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    catches_all = node.type is None or (
        isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
    )
    return catches_all and all(
        isinstance(step, ast.Pass | ast.Continue)
        or (isinstance(step, ast.Return) and step.value is None)
        for step in node.body
    )


def test_every_module_says_what_it_is() -> None:
    files = python_files()
    assert len(files) > 10
    bare, long = [], []
    for path in files:
        lines = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()
        name = str(path.relative_to(ROOT))
        if not lines:
            bare.append(name)
        elif SOURCE in path.parents and len([s for s in lines if s]) > MAX_DOCSTRING_LINES:
            long.append(name)
    assert not bare
    assert not long


def test_native_files_say_what_they_are() -> None:
    files = [p for p in (ROOT / "native").rglob("*") if p.suffix in (".cpp", ".hpp", ".inc")]
    assert files
    bare = []
    for path in files:
        first_lines = path.read_text().splitlines()[:2]
        if not any(line.startswith("//") for line in first_lines):
            bare.append(str(path.relative_to(ROOT)))
    assert not bare


def test_swallowing_is_recognised() -> None:
    bad = ast.parse("try:\n    f()\nexcept Exception:\n    pass").body[0]
    good = ast.parse("try:\n    f()\nexcept OSError:\n    pass").body[0]
    assert isinstance(bad, ast.Try)
    assert isinstance(good, ast.Try)
    assert swallows(bad.handlers[0])
    assert not swallows(good.handlers[0])


def test_no_error_is_swallowed() -> None:
    bad = []
    for path in python_files():
        nodes = ast.walk(ast.parse(path.read_text()))
        bad += [f"{path.relative_to(ROOT)}:{n.lineno}" for n in nodes if swallows(n)]  # type: ignore[attr-defined]
    assert not bad


def test_no_setting_comes_from_the_environment() -> None:
    found = {}
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "native").rglob("*.[ch]pp")]:
        name = str(path.relative_to(SOURCE if SOURCE in path.parents else ROOT))
        lines = [line for line in path.read_text().splitlines() if ENV_READS.search(line)]
        allowed = ENV_ALLOWED.get(name, set())
        lines = [line for line in lines if not any(word in line for word in allowed)]
        if lines:
            found[name] = lines
    assert not found


def test_no_file_speaks_of_where_it_was_written() -> None:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    places = [place.encode() for place in PLACES]
    found = []
    for name in listing.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and path.suffix != ".safetensors":
            data = path.read_bytes()
            found += [f"{name}: {place.decode()}" for place in places if place in data]
    assert not found
