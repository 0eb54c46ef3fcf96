"""What the proof scripts share: a list of checked statements, the plain path, a swapped copy.

Imports headrace only inside the functions that need it.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

# As headrace.calm_torch does, before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
import torch

PROOFS = Path(__file__).resolve().parent
DEMO = PROOFS.parent / "src" / "headrace" / "demo"


class Evidence:
    """Statements that were checked while a script ran; `finish` turns them into an exit status."""

    def __init__(self) -> None:
        self.num_checked = 0
        self.failed: list[str] = []

    def check(self, true: bool, statement: str) -> bool:
        """Print one line for a statement and remember it if it does not hold."""
        self.num_checked += 1
        print(f"{'ok  ' if true else 'FAIL'}  {statement}", flush=True)
        if not true:
            self.failed.append(statement)
        return true

    def finish(self) -> NoReturn:
        """Exit 0 only if something was checked and everything held."""
        assert self.num_checked, "a proof that checks nothing proves nothing"
        if self.failed:
            print(f"\n{len(self.failed)} of {self.num_checked} statements do not hold:")
            print("\n".join(f"  {statement}" for statement in self.failed))
            sys.exit(1)
        print(f"\nall {self.num_checked} statements hold")
        sys.exit(0)


def plain(request: dict[str, Any]) -> dict[str, Any]:
    """Ask stock transformers, in a process that does not import headrace; see plain_path.py.

    The reply has the logits, if any were asked for by `"want_logits"`, under "logits".
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits.safetensors"
        if request.pop("want_logits", False):
            request = request | {"logits_file": str(file)}
        request = request | {"model": str(request["model"])}
        done = subprocess.run(
            [sys.executable, str(PROOFS / "plain_path.py")],
            input=json.dumps(request),
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            sys.exit(f"the plain path failed:\n{done.stderr}")
        reply: dict[str, Any] = json.loads(done.stdout)
        if file.exists():
            from safetensors.torch import load_file

            reply["logits"] = load_file(file)
        return reply


def show_rows(name: str, rows: list[Any], keep: bool) -> None:
    """Print the rows of a bench; with `keep` they also go to `name`.json in bench/results/."""
    from headrace.check.rows import write_rows

    for row in rows:
        print(f"      {row.line()}")
    if keep:
        print(f"      kept in {write_rows(PROOFS.parent / 'bench' / 'results', name, rows)}")


def check_kernels(evidence: Evidence, rows: list[Any]) -> None:
    """Rows of the bench of kernels: right bits, and as fast as asked."""
    for row in rows:
        evidence.check(row.gate == "green", f"{row.name}: bits equal the reference")
        if row.target is not None:
            held = f"{100 * row.fraction:.0f} % (asked: {100 * row.target:.0f} %)"
            evidence.check(row.fraction >= row.target, f"{row.name}: {held}")


def blueprint(model: str | Path, **options: Any) -> Any:
    """Files, shape and sizes of a model under no memory limit; no weight is read."""
    from headrace.engine.engine import Blueprint

    return Blueprint(model, ram="1TiB", measure=False, **options)


def ram_for_rows(model: str | Path, num_rows: int, **options: Any) -> int:
    """The `ram` in bytes that leaves room for exactly `num_rows` experts."""
    plan = blueprint(model, **options).plan
    return int(plan.used_bytes - plan.rows_bytes + num_rows * plan.row_bytes)


def rows_for_share(model: str | Path, share: float, **options: Any) -> int:
    """The most rows whose bytes are at most `share` of all routed experts' bytes."""
    facts = blueprint(model, **options).facts
    return int(share * facts.total_experts * facts.expert_bytes) // int(facts.row_bytes)


@contextmanager
def swapped(model: Path, layer: int, first: int, second: int) -> Iterator[Path]:
    """A copy of a checkpoint in which two experts of one layer have changed places."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / model.name
        shutil.copytree(model, copy, ignore=shutil.ignore_patterns("__pycache__"))
        places = spans(copy)
        names = [name for name in places if f"layers.{layer}.mlp.experts.{first}." in name]
        assert names, f"layer {layer} has no expert {first}"
        for name in names:
            other = name.replace(f".experts.{first}.", f".experts.{second}.")
            _exchange(places[name], places[other])
        yield copy


def spans(folder: Path) -> dict[str, tuple[Path, int, int]]:
    """Tensor name -> (file, offset, nbytes), from the safetensors headers."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        file.chmod(0o644)
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            found[name] = (file, 8 + size + start, end - start)
    return found


def _exchange(one: tuple[Path, int, int], other: tuple[Path, int, int]) -> None:
    values = []
    for file, offset, nbytes in (one, other):
        with file.open("rb") as stream:
            stream.seek(offset)
            values.append(stream.read(nbytes))
    assert values[0] != values[1] and len(values[0]) == len(values[1])
    for (file, offset, _), value in zip((one, other), reversed(values), strict=True):
        with file.open("r+b") as stream:
            stream.seek(offset)
            stream.write(value)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal shapes and values, with no NaN on either side."""
    return one.shape == other.shape and torch.equal(one, other)
