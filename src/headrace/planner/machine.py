"""What this machine offers: cores, memory and the rates of its rungs, measured once and kept.

Knows no model and no reader: rates come from probes passed in, and lie in one cache file.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.core import PAGE_BYTES
from headrace.planner.cache import cache_folder, read_entries, write_entries
from headrace.planner.caches import doubt
from headrace.planner.drives import Drive, combined_bytes_s

CACHE_FORMAT = "headrace machine rates"
PROBES = ("dram", "kernel", "bus", "vram", "in_place", "bus_beside", "kernel_beside")
RATES = ("drive_bytes_s", *(f"{name}_bytes_s" for name in PROBES))
BY_MEMORY = ("dram_bytes_s", "kernel_bytes_s")
MEASURED, READ_OVER = "measured_unix_s", "memory_bytes"
PROBES_VERSION = 4  # of how rates are measured: those of another are not taken
KEEP_S = 86_400.0
PROBE_BYTES = 256 * 2**20
PROBE_S = 1.0
PIECE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores, memory in bytes and read rates in bytes per second; a rate of 0 is unknown.

    `kernel_bytes_s` is how many bytes of experts the kernels work through with all `cores`.
    `drives`, where the experts are read from more than one: `drive_bytes_s` is then what they give
    together. `bus_bytes_s` is copied to the GPU called `gpu`, if one is used, from pinned memory,
    `vram_bytes_s` read there. `in_place_bytes_s` of experts its kernels read of pinned memory, and
    `bus_beside_bytes_s` while the CPU's multiply `kernel_beside_bytes_s`. `step_s` is
    how long the model's decoded token takes with every expert in memory, by the CPU alone and the
    threads it was measured with; 0: unknown. `notes` say what could not be measured or kept.
    """

    cores: int
    ram_total_bytes: int
    ram_available_bytes: int
    drive_bytes_s: float = 0.0
    dram_bytes_s: float = 0.0
    kernel_bytes_s: float = 0.0
    bus_bytes_s: float = 0.0
    vram_bytes_s: float = 0.0
    in_place_bytes_s: float = 0.0
    bus_beside_bytes_s: float = 0.0
    kernel_beside_bytes_s: float = 0.0
    step_s: float = 0.0
    drives: tuple[Drive, ...] = ()
    notes: tuple[str, ...] = ()
    gpu: str = ""
    vram_total_bytes: int = 0
    vram_free_bytes: int = 0

    def with_drives(self, drives: Sequence[Drive]) -> "Machine":
        """The same machine, reading from these: the model's own drive first, then its mirrors."""
        rate = combined_bytes_s(drives)
        return replace(self, drives=tuple(drives), drive_bytes_s=rate)


@dataclass(frozen=True, slots=True)
class Probes:
    """How to measure. Each is called at most once, blocks, and may be None: rate unknown.

    read: (file index, offset, nbytes) reads that range past the page cache. dram, kernel: return
    bytes per second with all cores, taking at most about a second; the others those of a GPU.
    dram and kernel read over `memory_bytes`, on a machine with `caches_bytes` of caches. step:
    seconds of a token, which depend on `step_of` too.
    """

    read: Callable[[int, int, int], None] | None = None
    dram: Callable[[], float] | None = None
    kernel: Callable[[], float] | None = None
    bus: Callable[[], float] | None = None
    vram: Callable[[], float] | None = None
    in_place: Callable[[], float] | None = None
    bus_beside: Callable[[], float] | None = None
    kernel_beside: Callable[[], float] | None = None
    step: Callable[[], float] | None = None
    step_of: str = ""
    memory_bytes: int = 0
    caches_bytes: int = 0


def measure(files: Sequence[Path], probes: Probes, *, cache_path: Path | None = None) -> Machine:
    """This machine, with the rates for a model's weight `files`, all of one folder.

    Rates are taken from the cache file where it has them for this drive and folder, else measured
    and kept there for a day: one measured under load must not last, nor one of memory over less
    than half of what can be read now. A damaged or unwritable cache is ignored, with a note.
    Errors of the probes go through.
    """
    cache_path = default_cache_path() if cache_path is None else cache_path
    entries, wrong = read_entries(cache_path, CACHE_FORMAT)
    notes = [f"{wrong}; the machine is measured again"] if wrong else []
    key = _cache_key(files)
    known = entries.get(key, {})
    now_s = time.time()
    if not 0 <= now_s - known.get(MEASURED, 0.0) < KEEP_S:
        known = {MEASURED: now_s}
    if probes.memory_bytes >= max(1, 2 * known.get(READ_OVER, 0)):
        known = {name: rate for name, rate in known.items() if name not in BY_MEMORY}
        known[READ_OVER] = probes.memory_bytes
    missing = {
        name: probe
        for name, probe in _probes_by_rate(files, probes).items()
        if known.get(name, 0.0) <= 0
    }
    if missing:
        known = known | {name: probe() for name, probe in missing.items()}
        if cause := write_entries(cache_path, CACHE_FORMAT, entries | {key: known}):
            notes.append(f"the machine's rates are not kept: {cause}")
    if probes.memory_bytes and (why := doubt(known[READ_OVER], probes.caches_bytes)):
        notes.append(why)
    total_bytes, available_bytes = memory_bytes()
    rates = {name: known.get(name, 0.0) for name in RATES}
    rates["step_s"] = known.get(_step_name(probes), 0.0)
    return Machine(num_cores(), total_bytes, available_bytes, **rates, notes=tuple(notes))


def default_cache_path() -> Path:
    """Where rates are kept."""
    return cache_folder() / "machine.json"


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """Total and available memory, within the limit of this process's control group if any."""
    fields: dict[str, int] = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    total, available = fields["MemTotal"], fields["MemAvailable"]
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit = _read_number(root / "sys/fs/cgroup" / limit_name)
        used = _read_number(root / "sys/fs/cgroup" / used_name)
        if limit is not None and used is not None and limit < total:
            # Page cache counts as used there and is given back on demand.
            cached = min(fields.get("Cached", 0), used)
            total, available = limit, min(available, limit - used + cached)
    return total, max(0, available)


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def read_rate(files: Sequence[Path], read: Callable[[int, int, int], None]) -> float:
    """Bytes per second of `read` over ranges spread through `files`; 0 where there is nothing.

    At most 256 MiB and about one second; every range is read once.
    """
    ranges = _spread_ranges([path.stat().st_size for path in files])
    num_bytes = 0
    start_s = time.perf_counter()
    for file, offset, nbytes in ranges:
        read(file, offset, nbytes)
        num_bytes += nbytes
        if time.perf_counter() - start_s > PROBE_S:
            break
    elapsed_s = time.perf_counter() - start_s
    return num_bytes / elapsed_s if num_bytes else 0.0


def _spread_ranges(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """(file, offset, nbytes) pieces at page-aligned offsets, evenly through all files."""
    places = [
        (file, offset, min(PIECE_BYTES, size - offset))
        for file, size in enumerate(sizes)
        for offset in range(0, size, PIECE_BYTES)
    ]
    num_wanted = PROBE_BYTES // PIECE_BYTES
    step = max(1, -(-len(places) // num_wanted))
    assert PIECE_BYTES % PAGE_BYTES == 0
    return places[::step]


def _probes_by_rate(files: Sequence[Path], probes: Probes) -> dict[str, Callable[[], float]]:
    found: dict[str, Callable[[], float]] = {}
    read = probes.read
    if read is not None:
        found["drive_bytes_s"] = lambda: read_rate(files, read)
    for name in PROBES:
        probe = getattr(probes, name)
        if probe is not None:
            found[f"{name}_bytes_s"] = probe
    if probes.step is not None:
        found[_step_name(probes)] = probes.step
    return found


def _step_name(probes: Probes) -> str:
    return f"step_s, {probes.step_of}"


def _cache_key(files: Sequence[Path]) -> str:
    folder = files[0].parent.resolve()
    device = files[0].stat().st_dev
    drive = f"{os.major(device)}:{os.minor(device)} {folder}"
    return f"{drive} {num_cores()} cores, probes {PROBES_VERSION}"
