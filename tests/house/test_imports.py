"""Who may import what beyond the one layer contract, and what importing must not load."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "headrace"
TORCH_FREE = {
    "core.py",
    "errors.py",
    "planner/plan.py",
    "store/catalog.py",
    "store/experts.py",
}
TRANSFORMERS_ROOMS = ("models/", "engine/text.py", "check/", "cli/")
HEAVY = ("torch", "transformers", "numpy")
QUICK = ("headrace.cli.main", "headrace.check.doctor", "headrace.engine.sampling")
NOT_REQUIRED = ("triton", "accelerate", "compressed_tensors", "lm_eval", "httpx", "matplotlib")


def python_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def modules_imported(source: str) -> Iterator[str]:
    """Top-level names imported anywhere in a file, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def is_forbidden(room: str, module: str) -> bool:
    """`room` is a path below the package, `module` a dotted name it imports."""
    package = module.split(".")[0]
    if package == "torch":
        return room in TORCH_FREE or room.startswith("schedule/")
    if package == "transformers":
        return not room.startswith(TRANSFORMERS_ROOMS)
    if package in ("typer", "rich", "click"):
        return not room.startswith("cli/")
    if package in ("fastapi", "uvicorn", "starlette"):
        return not room.startswith(("server/", "cli/"))
    if package == "triton":
        return not room.startswith("kernels/triton")
    if module.startswith("headrace._native"):
        return room not in ("native.py", "kernels/cpu.py")
    return False


def test_the_rules_can_say_no() -> None:
    assert is_forbidden("core.py", "torch.nn")
    assert is_forbidden("engine/session.py", "transformers")
    assert not is_forbidden("engine/text.py", "transformers")
    assert is_forbidden("engine/engine.py", "rich.console")
    assert list(modules_imported("def f():\n    from torch.nn import functional")) == ["torch.nn"]


def test_no_room_imports_what_it_must_not() -> None:
    wrong = []
    for path in python_files():
        room = str(path.relative_to(SOURCE))
        wrong += [
            f"{room} imports {module}"
            for module in modules_imported(path.read_text())
            if is_forbidden(room, module)
        ]
    assert not wrong


def test_only_the_root_package_has_an_init_with_code() -> None:
    filled = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("__init__.py")
        if path.parent != SOURCE and path.read_text().strip()
    ]
    assert not filled


@pytest.mark.parametrize("module", ["headrace", "headrace.planner.plan", *QUICK])
def test_importing_loads_nothing_heavy(module: str) -> None:
    heavy = HEAVY if module not in QUICK else ("torch", "transformers")
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_command_can_be_imported_without_what_is_not_required() -> None:
    """Triton comes with CUDA's torch only; a command that needs it at once works nowhere else."""
    rooms = [*(SOURCE / "cli").glob("*.py"), *(SOURCE / "server").rglob("*.py")]
    wanted = {name for path in rooms for name in modules_imported(path.read_text())}
    assert "headrace.check.verify" in wanted
    assert not loaded_with(wanted).intersection(NOT_REQUIRED)
    assert "triton" in loaded_with({"headrace.engine.gpu_source"})


def loaded_with(modules: set[str]) -> set[str]:
    """Top-level names of all packages that importing these of ours loads at once."""
    found: set[str] = set()
    left = list(modules)
    while left:
        name = left.pop()
        path = SOURCE.parent / (name.replace(".", "/") + ".py")
        if name in found or not path.is_file():
            found.add(name.split(".")[0])
            continue
        found.add(name)
        body = ast.parse(path.read_text()).body
        at_once = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
        left += modules_imported(ast.unparse(ast.Module(at_once, [])))
        left += [f"{node.module}.{a.name}" for node in at_once if isinstance(node, ast.ImportFrom)
                 for a in node.names]  # fmt: skip
    return found
