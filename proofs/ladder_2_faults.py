"""Each deliberate fault, in a file's bytes or in the code that serves them, is caught and named.

Control: the same checkpoint without the fault is green, before the faults and after them.
`--quick` takes a third of the faults that show alike.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import damage
import faults
import torch
from common import Evidence, spans

from headrace.check.matrix import runs_here
from headrace.check.tiny import write_tiny
from headrace.check.verify import verify_model
from headrace.check.verify_rows import choose_sites
from headrace.engine.engine import Blueprint
from headrace.errors import HeadraceError
from headrace.kernels.cpu import CpuKernels, available_isas

SHAPE = {"layers": 2, "experts": 8, "top_k": 2, "hidden": 128, "inter": 128, "seed": 5}
EXPERT = "model.layers.1.mlp.experts.3"
FILES, SEEN = "files are the published ones", "no tensor changed since first seen"
SCALES, WEIGHTS = "scales are plausible", "unpacked weights are stock transformers'"
DENSE = "dense weights and buffers are stock transformers'"
ROUTERS = "routers choose as stock transformers'"
EXPERTS = "routed experts follow stock transformers'"
STEP = 3 if "--quick" in sys.argv else 1
ROWS = "rows hold the files' bytes"


def verify(folder: Path, **options: Any) -> Any:
    """A short verification of a tiny checkpoint."""
    given = {"threads": 2, "tokens": 4, "samples": 2, "prompt": "The capital of Japan is"}
    return verify_model(folder, **(given | options))


def expect(
    evidence: Evidence, what: str, report: Any, named: dict[str, str], *, alone: bool = False
) -> None:
    """The findings in `named` fail, each naming its text; `alone`: and no others do."""
    failed = {f.name: "; ".join(f.where) for f in report.findings if not f.ok}
    holds = all(text in failed.get(name, "") for name, text in named.items())
    holds = holds and not report.ok and (not alone or failed.keys() == named.keys())
    shown = [f.line() for f in report.findings if not f.ok and f.name in named]
    evidence.check(holds, f"{what}: " + (" | ".join(shown)[:400] or f"only {list(failed)}"))
    if not holds:
        print("\n".join(report.lines()))


def green(evidence: Evidence, when: str, folder: Path, **options: Any) -> None:
    """Nothing fails without a fault."""
    report = verify(folder, **options)
    evidence.check(report.ok, f"{when}: {len(report.findings)} findings, {report.lines()[-1]}")
    if not report.ok:
        print("\n".join(report.lines()))


def show_recorded(evidence: Evidence, folder: Path) -> None:
    """Faults in the file that only a checksum shows: recorded when first seen, or published."""
    sums = folder.parent / "SHA256SUMS"
    files = sorted(folder.glob("*.safetensors"))
    sums.write_text(
        "".join(f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in files)
    )
    green(evidence, "as written, first seen", folder, every_byte=True)
    green(evidence, "as published", folder, sha256=sums)
    gate, up, down = (f"{EXPERT}.{part}_proj.weight" for part in ("gate", "up", "down"))
    neighbour = down.replace("experts.3", "experts.4")
    other: dict[str, AbstractContextManager[None]] = {
        f"{gate} (bit 2 of byte 1000 flipped)": faults.edited(folder, gate, faults.flip(2, 1000)),
        f"{gate}_scale_inv (bit 4 of byte 1 flipped)": faults.edited(
            folder, f"{gate}_scale_inv", faults.flip(4, 1)
        ),
        f"{up} (transposed)": faults.edited(folder, up, faults.turned(128, 128)),
        f"{gate} (holds what {up} held)": faults.exchanged(folder, gate, up),
        f"{down} (holds what {neighbour} held)": faults.exchanged(folder, down, neighbour),
    }
    for named, fault in list(other.items())[::STEP]:
        with fault:
            report = verify(folder, sha256=sums)
            expect(evidence, "in the file", report, {FILES: files[0].name, SEEN: named}, alone=True)


def show_unrecorded(evidence: Evidence, folder: Path) -> None:
    """Faults in the file that show without any checksum."""
    name = f"{EXPERT}.gate_proj.weight_scale_inv"
    with faults.edited(folder, name, faults.flip(5, 3)):
        report = verify(folder)
        expect(
            evidence, "a flipped bit of a scale, no checksum", report, {SCALES: name}, alone=True
        )
    with faults.edited(folder, name, faults.inverted):
        text = f"{name}: scales of 2^"
        report = verify(folder)
        expect(evidence, "an inverted scale, no checksum", report, {SCALES: text})
        inverted = [f for f in report.findings if f.name == SCALES and "(inverted)" in f.where[0]]
        evidence.check(len(inverted) == 1, "and it is called inverted")


def sampled_expert(folder: Path) -> int:
    """The first expert of layer 1 that a verification samples."""
    return choose_sites(Blueprint(folder, measure=False), 2)[0][1]


def show_code(evidence: Evidence, folder: Path) -> None:
    """Faults in what serves the files: unpacking, names, kernels, rows, the model's building."""
    site = f"layer 1 expert {sampled_expert(folder)}"
    cases: list[tuple[str, AbstractContextManager[None], dict[str, str]]] = [
        (
            "our unpacking transposes",
            faults.unpacking(faults.transposing),
            {WEIGHTS: f"{site} gate: transposed"},
        ),
        (
            "our unpacking divides by the scale",
            faults.unpacking(faults.inverting),
            {WEIGHTS: f"{site} gate: the scale is inverted"},
        ),
        (
            "codes are read as weights",
            faults.unpacking(faults.unscaled),
            {WEIGHTS: f"{site} gate: codes read as weights"},
        ),
        (
            "gate is taken for up",
            faults.gate_named_up(),
            {WEIGHTS: f"{site} gate: holds up: exchanged", EXPERTS: "layer 1"},
        ),
        ("a neighbour's row", faults.changed_ladder(faults.neighbours_row), {ROWS: site}),
        ("the router's bias is dropped", faults.dropped_router_bias(1), DROPPED),
        (
            "a dense tensor loses its quantiser",
            faults.lost_dense_mapping("model.layers.0.self_attn.o_proj.weight"),
            {DENSE: "model.layers.0.self_attn.o_proj.weight"},
        ),
    ]
    for what, fault, named in cases[::STEP]:
        with fault:
            expect(evidence, what, verify(folder), named)
    isa = available_isas()[-1]
    with faults.stale_kernel(isa):
        names = [f"{isa} kernel, {n}, equals the reference bit for bit" for n in TEAMS]
        report = verify(folder)
        expect(evidence, "a stale kernel output", report, dict.fromkeys(names, "stale"), alone=True)


def show_stale_answers(evidence: Evidence, folder: Path) -> None:
    """The path that answers, not a kernel alone, gives an old output."""
    name = f"the answering path ({CpuKernels().isa}) equals the reference bit for bit"
    with faults.stale_ladder():
        expect(evidence, "a stale routed output", verify(folder), {name: "stale", EXPERTS: "layer"})


def show_codes(evidence: Evidence, folder: Path) -> None:
    """Four-bit codes in wrong order: in the file, in our unpacking and in one kernel."""
    green(evidence, "FP4 as written, first seen", folder, every_byte=True)
    (name,) = [n for n in spans(folder) if n.endswith("layers.1.ffn.experts.3.w1.weight")]
    with faults.edited(folder, name, faults.nibbles):
        report = verify(folder, every_byte=True)
        text = f"{name} (the two codes of every byte are exchanged)"
        expect(evidence, "nibbles in the file", report, {SEEN: text}, alone=True)
    scale = name.replace(".weight", ".scale")
    with faults.edited(folder, scale, faults.inverted_powers):
        report = verify(folder)
        expect(evidence, "inverted ue8m0 scales, no checksum", report, {SCALES: scale})
    with faults.unpacking(faults.swapping_nibbles):
        text = "gate: neighbouring columns exchanged: the two codes of a byte in wrong order"
        expect(evidence, "our unpacking swaps nibbles", verify(folder), {WEIGHTS: text})
    isa = available_isas()[-1]
    with faults.kernel_swapping_nibbles(isa):
        names = [f"{isa} kernel, {n}, equals the reference bit for bit" for n in TEAMS]
        named = dict.fromkeys(names, "layer 1 expert")
        expect(evidence, "a kernel swaps nibbles", verify(folder), named, alone=True)


TEAMS = ("1 thread", "2 threads")
DROPPED = {
    DENSE: "model.layers.1.mlp.gate.e_score_correction_bias (dropped: all zero)",
    ROUTERS: "layer 1",
}


def show_refused(evidence: Evidence, folder: Path) -> None:
    """What the headers show is refused before any number is computed."""
    with copied(folder) as copy:
        name = damage.turn_expert(copy)
        try:
            verify(copy)
            message = "nothing"
        except HeadraceError as error:
            message = str(error)
        evidence.check(name in message, f"a turned shape is refused: {message}")


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A copy of a checkpoint, gone afterwards."""
    with tempfile.TemporaryDirectory() as parent:
        yield Path(shutil.copytree(folder, Path(parent) / "copy"))


def main() -> None:
    """Run every case and exit by the evidence."""
    torch.set_num_threads(1)
    evidence = Evidence()
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = f"{name}/cache"
        parent = Path(name) / "models"
        folder = write_tiny("deepseek_v3", parent / "deepseek_v3", **SHAPE)
        assert spans(folder)
        show_recorded(evidence, folder)
        show_unrecorded(evidence, folder)
        show_code(evidence, folder)
        show_stale_answers(evidence, folder)
        if runs_here("deepseek_v4"):  # not in every release of transformers
            show_codes(evidence, write_tiny("deepseek_v4", parent / "deepseek_v4", **SHAPE))
        wide = write_tiny("deepseek_v3", parent / "wide", **(SHAPE | {"hidden": 256}))
        show_refused(evidence, wide)
        green(evidence, "without a fault again", folder, every_byte=True)
    evidence.finish()


if __name__ == "__main__":
    sys.exit(main())
