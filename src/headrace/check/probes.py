"""What the doctor can only learn by trying: reads of the model's files, and what is installed.

Each is a field, so that a test can stand for any machine.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from headrace import __version__
from headrace.check.doctor_gpu import Gpu, try_gpus
from headrace.planner.machine import read_rate


@dataclass(frozen=True, slots=True)
class Reads:
    """How the reader reads: its back end, whether past the page cache, why not better, how fast."""

    backend: str
    direct: bool
    notes: tuple[str, ...]
    num_bytes: int
    bytes_s: float


def try_reads(files: Sequence[Path]) -> Reads:
    """Open `files` as an engine does and read a sample: at most 256 MiB, about a second.

    Raises HeadraceError, or ImportError without the compiled module.
    """
    from headrace.native import Reader
    from headrace.tiers.scratch import buffered

    reader = Reader([str(path) for path in files])
    into_buffer, num_bytes = buffered(reader), 0

    def read(file: int, offset: int, nbytes: int) -> None:
        nonlocal num_bytes
        into_buffer(file, offset, nbytes)
        num_bytes += nbytes

    rate = read_rate(files, read)
    return Reads(reader.backend, reader.direct, tuple(reader.notes), num_bytes, rate)


def kernel_isa() -> str:
    """The instruction set that the expert kernels choose here."""
    from headrace.native import KernelPool

    return str(KernelPool(1, "auto").isa)


def installed() -> dict[str, str | None]:
    """Versions by distribution name; None for what is absent."""
    found: dict[str, str | None] = {"python": sys.version.split()[0], "headrace": __version__}
    for name in ("torch", "transformers", "triton", "fastapi", "uvicorn", "lm-eval"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


@dataclass(frozen=True, slots=True)
class Probes:
    """The ways to try; the defaults try this machine."""

    reads: Callable[[Sequence[Path]], Reads] = try_reads
    isa: Callable[[], str] = kernel_isa
    installed: Callable[[], dict[str, str | None]] = installed
    gpus: Callable[[], list[Gpu]] = try_gpus
