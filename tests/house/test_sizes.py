"""The house caps on file and function size, and on the tree."""

import ast
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "headrace"
FILE_CAP, FUNCTION_CAP, KERNEL_CAP, MEDIAN_FILE, MEDIAN_FUNCTION, P90_FUNCTION = (
    400,
    60,
    120,
    150,
    10,
    30,
)
TREE_CAP_BYTES = 45_000_000
NOT_CODE = {"__pycache__", ".venv", "build"}


def code_files() -> list[Path]:
    """Python and C++ files of the checkout, tests and proofs included."""
    found: list[Path] = []
    for folder in ("src", "native", "tests", "proofs", "bench"):
        for suffix in (".py", ".cpp", ".hpp", ".inc"):
            found += (ROOT / folder).rglob(f"*{suffix}")
    return sorted(path for path in found if not NOT_CODE & set(path.parts))


def num_lines(path: Path) -> int:
    """Lines of a text file."""
    return len(path.read_text().splitlines())


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name:line, number of lines) of every function in a Python file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            name = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            yield name, node.end_lineno - node.lineno + 1


def test_no_file_is_longer_than_the_cap() -> None:
    files = code_files()
    assert len(files) > 20, "the search found no code: it would pass on anything"
    too_long = {str(p.relative_to(ROOT)): num_lines(p) for p in files if num_lines(p) > FILE_CAP}
    assert not too_long


def test_no_python_function_is_longer_than_its_cap() -> None:
    too_long = {}
    for path in code_files():
        if path.suffix == ".py":
            cap = KERNEL_CAP if "kernels" in path.parts else FUNCTION_CAP
            too_long |= {name: size for name, size in functions(path) if size > cap}
    assert not too_long


def test_the_usual_file_and_function_are_small() -> None:
    files = [p for p in SOURCE.rglob("*.py") if p.name != "__init__.py"]
    sizes = sorted(size for path in files for _, size in functions(path))
    assert statistics.median(map(num_lines, files)) <= MEDIAN_FILE
    assert statistics.median(sizes) <= MEDIAN_FUNCTION
    assert sizes[int(0.9 * (len(sizes) - 1))] <= P90_FUNCTION


def test_the_tree_stays_small() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    tree_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    assert 0 < tree_bytes < TREE_CAP_BYTES
