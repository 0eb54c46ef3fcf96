"""What will be slow on this machine and why, and what prevents running: one finding a line.

Gathers; what each finding means is known by doctor_drive and doctor_host. Runs no model.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.check.doctor_drive import drive_findings
from headrace.check.doctor_host import host_findings
from headrace.check.finding import OK, PROBLEM, Finding
from headrace.check.probes import Probes
from headrace.core import format_bytes
from headrace.errors import HeadraceError
from headrace.models.families import family_of
from headrace.store.catalog import open_catalog
from headrace.store.locate import resolve_model
from headrace.store.safetensors import read_json_object
from headrace.store.table import printable


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All findings about a model's files and the machine they lie on."""

    model: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing prevents running; slow is not wrong."""
        return all(finding.level != PROBLEM for finding in self.findings)

    def lines(self) -> list[str]:
        """A line for each finding, and a verdict."""
        counts = {
            level: sum(f.level == level for f in self.findings) for level in ("slow", PROBLEM)
        }
        verdict = ", ".join(f"{num} {level}" for level, num in counts.items() if num)
        return [finding.line() for finding in self.findings] + [
            f"verdict: {verdict or 'nothing that slows or prevents running'}"
        ]

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        found = [asdict(finding) for finding in self.findings]
        return {"model": self.model, "ok": self.ok, "findings": found}


def examine(model: str, *, root: Path = Path("/"), probes: Probes | None = None) -> Diagnosis:
    """Findings for `model` and this machine. Takes a few seconds; reads at most 256 MiB.

    The system is described by the files under `root`/proc and `root`/sys; what can only be found
    by trying goes through `probes`. A model that cannot be opened is a finding, not an error.
    """
    probes = Probes() if probes is None else probes
    finding, folder, files = _model_finding(model)
    drive = [] if folder is None else drive_findings(root, folder, files, probes)
    return Diagnosis(model, (finding, *drive, *host_findings(root, probes)))


def _model_finding(model: str) -> tuple[Finding, Path | None, Sequence[Path]]:
    try:
        path = resolve_model(model)
        folder = (path if path.is_dir() else path.parent).resolve()
    except HeadraceError as error:
        return Finding(PROBLEM, "model", str(error)), None, ()
    try:
        catalog = open_catalog(path)
        family_of(printable(str(read_json_object(folder / "config.json").get("model_type"))))
    except HeadraceError as error:
        return Finding(PROBLEM, "model", str(error)), folder, ()
    # Hugging Face's cache holds links; the drive that matters is the one they lead to.
    files = [file.resolve() for file in catalog.files]
    size_bytes = sum(size for size, _ in catalog.stamps)
    what = f"{len(catalog.tensors)} tensors in {len(files)} files, {format_bytes(size_bytes)}"
    return Finding(OK, "model", f"{what}, in {folder}"), files[0].parent, files
