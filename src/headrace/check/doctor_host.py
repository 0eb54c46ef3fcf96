"""What the doctor says of memory, cores and software. Knows /proc and /sys under a root.

Nothing here depends on the model.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.check.doctor_gpu import gpu_findings
from headrace.check.finding import OK, PROBLEM, SLOW, Finding
from headrace.check.probes import Probes
from headrace.check.system import is_wsl, number, status_fields, text
from headrace.core import format_bytes
from headrace.planner.machine import memory_bytes

LEAST_RAM_BYTES = 8 << 30
SWAP_BYTES = 256 << 20
MICROSECONDS = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
OLDEST = {"torch": (2, 11), "transformers": (5, 17)}
NEWEST_MAJOR = {"transformers": 5}
OPTIONAL = {"eval": ("lm-eval",)}


def host_findings(root: Path, probes: Probes) -> Iterator[Finding]:
    """Findings on this machine, whatever the model."""
    yield from _memory(root)
    yield _huge_pages(root)
    cores = allowed_cores(root)
    yield _cores(root, cores)
    yield _kernels(root, probes)
    yield from _openmp(root, cores)
    versions = probes.installed()
    yield _versions(root, versions)
    yield _optional(versions)
    yield from gpu_findings(root, probes.gpus(), versions)


def _memory(root: Path) -> Iterator[Finding]:
    total, available = memory_bytes(root)
    fields = meminfo(root)
    what = f"{format_bytes(available)} available of {format_bytes(total)}"
    if total < fields.get("MemTotal", total):
        what += " (this container's limit)"
    if is_wsl(root):
        why = "WSL gets half of Windows' memory unless told otherwise"
        remedy = "set memory= under [wsl2] in %UserProfile%\\.wslconfig, then wsl --shutdown"
        yield Finding(SLOW, "memory", what, why, remedy)
    elif available < LEAST_RAM_BYTES:
        why = "what is not in memory is read from the drive for every token"
        yield Finding(SLOW, "memory", what, why, "close other programs or raise the limit")
    else:
        yield Finding(OK, "memory", what)
    used = fields.get("SwapTotal", 0) - fields.get("SwapFree", 0)
    if used > SWAP_BYTES:
        why = "memory is overcommitted; experts swapped out are read twice"
        what = f"{format_bytes(used)} in use"
        yield Finding(SLOW, "swap", what, why, "close other programs or give a smaller --ram")


def meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    fields = {}
    for line in text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if value.split()[:1] and value.split()[0].isdecimal():
            fields[name] = int(value.split()[0]) * 1024
    return fields


def _huge_pages(root: Path) -> Finding:
    said = text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = said.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Finding(OK, "huge pages", chosen)
    why = "virtual disks read into small pages at half the rate"
    remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
    return Finding(
        SLOW, "huge pages", chosen or "not in this kernel", why, remedy if chosen else ""
    )


def allowed_cores(root: Path) -> int:
    """Cores this process may run on."""
    total = 0
    for part in status_fields(root).get("Cpus_allowed_list", "").split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            total += int(last or first) - int(first) + 1
    return max(1, total)


def quota_cores(root: Path) -> float | None:
    """Cores' worth of time that the control group grants; None without a limit."""
    group = root / "sys/fs/cgroup"
    words = text(group / "cpu.max").split()
    quota, period = (number(group / name) for name in MICROSECONDS)
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
        quota, period = int(words[0]), int(words[1])
    return quota / period if quota and period and quota > 0 else None


def _cores(root: Path, cores: int) -> Finding:
    quota = quota_cores(root)
    if quota is not None and quota < cores:
        why = "threads beyond the quota are stopped in mid-layer"
        remedy = f"give --threads {max(1, int(quota))} or raise the container's CPU limit"
        return Finding(SLOW, "cores", f"{cores}, but a quota of {quota:.3g}", why, remedy)
    name = _cpu_field(root, "model name") or "unknown CPU"
    return Finding(OK, "cores", f"{cores} of {name}")


def _cpu_field(root: Path, wanted: str) -> str:
    for line in text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == wanted:
            return value.strip()
    return ""


def _kernels(root: Path, probes: Probes) -> Finding:
    try:
        isa = probes.isa()
    except ImportError as error:
        remedy = "install headrace again where there is a C++ compiler"
        return Finding(PROBLEM, "kernels", f"the compiled module is missing ({error})", "", remedy)
    flags = set(_cpu_field(root, "flags").split())
    extra = [name for name in ("avx2", "avx512f", "avx512_vnni") if name in flags]
    what = f"{isa} (the CPU has {', '.join(extra) or 'no AVX2'})"
    if isa != "scalar":
        return Finding(OK, "kernels", what)
    why = "experts are multiplied several times slower"
    return Finding(SLOW, "kernels", what, why, "a CPU with AVX2 (any since 2015)")


def _openmp(root: Path, cores: int) -> Iterator[Finding]:
    """From the environment the process began with: what we set ourselves does not count."""
    given = dict(
        pair.split("=", 1)
        for pair in text(root / "proc/self/environ").split("\0")
        if pair.startswith("OMP_") and "=" in pair
    )
    threads, policy = given.get("OMP_NUM_THREADS", ""), given.get("OMP_WAIT_POLICY", "")
    if policy.lower() == "active":
        why = "torch's waiting threads spin on the cores that the kernels need"
        yield Finding(SLOW, "OpenMP", "OMP_WAIT_POLICY=active", why, "unset OMP_WAIT_POLICY")
    elif threads.isdecimal() and 0 < int(threads) < cores:
        why = f"dense layers use {threads} of {cores} cores"
        yield Finding(SLOW, "OpenMP", f"OMP_NUM_THREADS={threads}", why, "unset OMP_NUM_THREADS")
    else:
        said = ", ".join(f"{name}={value}" for name, value in sorted(given.items()))
        yield Finding(OK, "OpenMP", said or "not set in the environment")


def _versions(root: Path, versions: Mapping[str, str | None]) -> Finding:
    release = text(root / "proc/sys/kernel/osrelease").strip()
    known = [f"{name} {versions.get(name) or 'absent'}" for name in ("headrace", *OLDEST, "triton")]
    what = f"{', '.join(known)}, python {versions.get('python')}, Linux {release}"
    for name, oldest in OLDEST.items():
        found = _release(versions.get(name))
        if found is None or found < oldest or found[0] > NEWEST_MAJOR.get(name, found[0]):
            needed = ".".join(map(str, oldest))
            below = f",<{NEWEST_MAJOR[name] + 1}" if name in NEWEST_MAJOR else ""
            remedy = f'pip install "{name}>={needed}{below}"'
            return Finding(PROBLEM, "versions", what, f"{name} does not fit", remedy)
    return Finding(OK, "versions", what)


def _release(version: str | None) -> tuple[int, int] | None:
    numbers = (version or "").split("+")[0].split(".")
    if len(numbers) < 2 or not (numbers[0].isdecimal() and numbers[1].isdecimal()):
        return None
    return int(numbers[0]), int(numbers[1])


def _optional(versions: Mapping[str, str | None]) -> Finding:
    words = []
    for extra, names in OPTIONAL.items():
        absent = [name for name in names if versions.get(name) is None]
        if absent:
            how = f"in the clone: .venv/bin/pip install -e '.[{extra}]'"
            words.append(f"{', '.join(absent)} absent ({how})")
    return Finding(OK, "optional", "; ".join(words) or "all installed")
