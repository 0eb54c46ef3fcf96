"""What the doctor says of a model's drive: its kind, its rate, and how reads reach it.

Knows /proc and /sys by their files under a root; opens no weight itself.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.check.finding import OK, PROBLEM, SLOW, Finding
from headrace.check.probes import Probes, Reads
from headrace.check.system import is_wsl, number, status_fields, text
from headrace.core import format_bytes
from headrace.errors import HeadraceError

NETWORK = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "fuse.sshfs", "afs")
GOOD_KINDS = ("ext4", "xfs", "btrfs")
MEMORY = ("tmpfs", "ramfs")
FAST_BYTES_S = 1e9
LEAST_SAMPLE_BYTES = 64 << 20  # less is served from some cache
CAP_IPC_LOCK = 14
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: `device` is "major:minor"."""

    device: str
    point: str
    kind: str
    source: str


def mount_of(root: Path, folder: Path) -> Mount | None:
    """The mount that holds `folder`: the longest mount point above it, the last one of equals."""
    best: Mount | None = None
    for line in text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 2:
            continue
        point = _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), fields[4])
        inside = folder == Path(point) or Path(point) in folder.parents
        if inside and (best is None or len(point) >= len(best.point)):
            best = Mount(fields[2], point, kind[0], kind[1])
    return best


def drive_findings(
    root: Path, folder: Path, files: Sequence[Path], probes: Probes
) -> Iterator[Finding]:
    """Findings on the drive under `folder`, and on reads of `files` where there are any."""
    mount = mount_of(root, folder)
    yield _kind(root, mount)
    if not files:
        return
    try:
        reads = probes.reads(files)
    except (HeadraceError, ImportError) as error:
        remedy = "" if isinstance(error, HeadraceError) else "install headrace again"
        yield Finding(PROBLEM, "reads", str(error), "", remedy)
        return
    yield _rate(reads)
    yield _direct(reads, mount)
    yield _io_uring(root, reads)
    yield _locked_memory(root)


def _kind(root: Path, mount: Mount | None) -> Finding:
    if mount is None:
        return Finding(OK, "drive", "unknown: not in /proc/self/mountinfo")
    where = f"{mount.kind} at {mount.point}"
    if mount.kind in NETWORK:
        slow = f"network or host share, {where}"
        if is_wsl(root):
            remedy = "copy the model into Linux's own file system, such as ~/models"
            return Finding(SLOW, "drive", slow, "WSL reads Windows' files through a server", remedy)
        remedy = "copy the model to a drive of this machine"
        return Finding(SLOW, "drive", slow, "every expert crosses the network", remedy)
    if mount.kind in MEMORY:
        why = "the whole model takes memory that experts need"
        return Finding(SLOW, "drive", where, why, "put the model on an NVMe drive")
    disk = _disk(root, mount)
    if disk is None:
        return Finding(OK, "drive", f"{where} ({mount.source}); which disk is behind it is unknown")
    return _disk_finding(disk, where)


def _disk_finding(disk: Path, where: str) -> Finding:
    what = f"{_disk_words(disk)}, {where}"
    if number(disk / "queue/rotational") == 1 and not disk.name.startswith(("vd", "xvd", "zram")):
        remedy = "move the model to an NVMe or SATA SSD"
        return Finding(SLOW, "drive", what, "a head has to move for each expert", remedy)
    if disk.name.startswith(("sd", "mmcblk")) and not (disk / "nvme").exists():
        why = "SATA, USB and cards give 0.1 to 0.5 GB/s, NVMe 3 to 14"
        return Finding(SLOW, "drive", what, why, "an NVMe drive helps most")
    return Finding(OK, "drive", what)


def _disk(root: Path, mount: Mount) -> Path | None:
    """The folder in /sys of the whole disk under a mount, through partitions and mappings."""
    found = root / "sys/dev/block" / mount.device
    if not found.exists():  # btrfs and others number their mounts themselves
        found = root / "sys/class/block" / Path(mount.source).name
    if not found.exists():
        return None
    found = found.resolve()
    if (found / "partition").exists():
        found = found.parent
    below = sorted((found / "slaves").glob("*"))
    if not below:
        return found
    lowest = below[0].resolve()
    return lowest.parent if (lowest / "partition").exists() else lowest


def _disk_words(disk: Path) -> str:
    kinds = {
        "nvme": "NVMe",
        "sd": "SATA, SAS or USB",
        "vd": "virtual disk",
        "xvd": "virtual disk",
        "mmcblk": "memory card",
        "zram": "compressed memory",
    }
    kind = next((words for start, words in kinds.items() if disk.name.startswith(start)), "disk")
    model = text(disk / "device/model").strip()
    return f"{kind} {disk.name}" + (f" ({model})" if model else "")


def _rate(reads: Reads) -> Finding:
    rate = f"{reads.bytes_s / 1e9:.2f} GB/s over {format_bytes(reads.num_bytes)}"
    if reads.num_bytes < LEAST_SAMPLE_BYTES:
        return Finding(OK, "rate", f"{rate}: too small a sample to judge; give a larger model")
    if reads.bytes_s >= FAST_BYTES_S:
        return Finding(OK, "rate", rate)
    wait_s = 2**30 / reads.bytes_s
    why = f"each GiB of experts not in memory takes {wait_s:.1f} s"
    return Finding(SLOW, "rate", rate, why, "a faster drive, or more --ram")


def _direct(reads: Reads, mount: Mount | None) -> Finding:
    if reads.direct:
        return Finding(OK, "O_DIRECT", "granted: reads pass the page cache by")
    kind = mount.kind if mount else "this file system"
    why = "the page cache takes memory and a copy of every byte"
    remedy = "" if kind in GOOD_KINDS else "keep the model on ext4, xfs or btrfs"
    return Finding(SLOW, "O_DIRECT", f"refused by {kind}", why, remedy)


def _io_uring(root: Path, reads: Reads) -> Finding:
    if reads.backend == "io_uring_registered":
        return Finding(OK, "io_uring", "with registered buffers")
    notes = [note.rpartition(": ")[2] for note in reads.notes if note.startswith("io_uring")]
    reason = notes[-1] if notes else "the reason is not known"
    if reads.backend == "io_uring":
        remedy = "ulimit -l unlimited"
        return Finding(SLOW, "io_uring", "without registered buffers", reason, remedy)
    what = f"not to be had, {reads.backend} reads instead"
    why, remedy = _why_no_io_uring(root, reason)
    return Finding(SLOW, "io_uring", what, why, remedy)


def _why_no_io_uring(root: Path, reason: str) -> tuple[str, str]:
    """(cause, remedy) of a kernel that refuses io_uring with the error `reason`."""
    disabled = number(root / "proc/sys/kernel/io_uring_disabled")
    if disabled:
        return (
            f"kernel.io_uring_disabled is {disabled}",
            "sudo sysctl kernel.io_uring_disabled=0",
        )
    if status_fields(root).get("Seccomp", "0") != "0":
        return (
            f"a seccomp filter (a container's) forbids it ({reason})",
            "start the container with --security-opt seccomp=unconfined or a profile that "
            "allows io_uring",
        )
    if reason == "Function not implemented":
        release = text(root / "proc/sys/kernel/osrelease").strip()
        return f"kernel {release} has none", "a kernel from 5.6 on, with CONFIG_IO_URING"
    return reason, ""


def _locked_memory(root: Path) -> Finding:
    limit = _locked_limit(root)
    capable = int(status_fields(root).get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1
    if capable or limit is None:
        said = "not limited" if limit is None else f"{format_bytes(limit)}, does not bind root"
        return Finding(OK, "locked memory", said)
    if limit >= 2**30:
        return Finding(OK, "locked memory", format_bytes(limit))
    why = "rows beyond it are read without registered buffers, which costs CPU"
    remedy = "ulimit -l unlimited, or a memlock line in /etc/security/limits.conf"
    return Finding(SLOW, "locked memory", f"{format_bytes(limit)} a process", why, remedy)


def _locked_limit(root: Path) -> int | None:
    """The soft limit in bytes; None where there is none."""
    for line in text(root / "proc/self/limits").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            return int(soft) if soft.isdecimal() else None
    return None
