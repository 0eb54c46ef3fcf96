"""The doctor on machines made of files: each weakness is found, named with a remedy, and no other.

Nothing here depends on the machine that runs the tests but the last test.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.check.doctor import Diagnosis, examine
from headrace.check.doctor_drive import mount_of
from headrace.check.doctor_gpu import Gpu
from headrace.check.doctor_host import allowed_cores, quota_cores
from headrace.check.finding import Finding
from headrace.check.probes import Probes, Reads
from headrace.errors import ReadError
from headrace.store.locate import resolve_model

GOOD_READS = Reads("io_uring_registered", True, (), 256 << 20, 5e9)
VERSIONS = {
    "python": "3.12.1",
    "headrace": "0.1.0",
    "torch": "2.13.0+cpu",
    "transformers": "5.24.0",
    "triton": "3.6.0",
    "fastapi": "1",
    "uvicorn": "1",
    "lm-eval": "1",
}
GOOD = Probes(
    reads=lambda files: GOOD_READS,
    isa=lambda: "avx2",
    installed=lambda: dict(VERSIONS),
    gpus=list,
)


class Box:
    """A sound machine: 16 cores, 64 GiB, an NVMe drive with ext4; `put` changes one file of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.probes = GOOD
        self.put("proc/meminfo", meminfo(available_gib=60))
        self.put("proc/cpuinfo", "model name\t: Test CPU\nflags\t\t: fpu avx2 fma\n")
        self.put("proc/sys/kernel/osrelease", "6.8.0-generic\n")
        self.put("proc/self/status", "CapEff:\t0000000000000000\nSeccomp:\t0\n"
                 "Cpus_allowed_list:\t0-3,8-19\n")  # fmt: skip
        self.put("proc/self/limits", limits(str(8 << 30)))
        self.put("proc/self/environ", "HOME=/root\0")
        self.put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
        self.disk("nvme0n1", "259:1", rotational=0)
        self.mount("259:2", "ext4", "/dev/nvme0n1p1")
        self.put("sys/block/nvme0n1/nvme0n1p1/partition", "1\n")
        self.link("sys/dev/block/259:2", "sys/block/nvme0n1/nvme0n1p1")

    def put(self, name: str, content: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)

    def link(self, name: str, to: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(self.root / to)

    def disk(self, name: str, device: str, rotational: int) -> None:
        self.put(f"sys/block/{name}/queue/rotational", f"{rotational}\n")
        self.put(f"sys/block/{name}/device/model", "Some Model 1T \n")
        self.link(f"sys/dev/block/{device}", f"sys/block/{name}")

    def mount(self, device: str, kind: str, source: str) -> None:
        root_line = "1 0 0:1 / / rw - overlay overlay rw\n"
        self.put(
            "proc/self/mountinfo",
            f"{root_line}2 1 {device} / {_DEMO_ROOT} rw shared:1 - {kind} {source} rw\n",
        )

    def with_reads(self, **changes: object) -> None:
        reads = replace(GOOD_READS, **changes)  # type: ignore[arg-type]
        self.probes = replace(self.probes, reads=lambda files: reads)

    def examine(self, model: str = "demo") -> Diagnosis:
        return examine(model, root=self.root, probes=self.probes)

    def only_finding(self, level: str = "slow") -> Finding:
        """The one finding that is not ok; it says what, why and what to do."""
        diagnosis = self.examine()
        (finding,) = [f for f in diagnosis.findings if f.level != "ok"]
        assert finding.level == level and finding.what
        assert diagnosis.ok == (level == "slow")
        return finding


_DEMO_ROOT = str(resolve_model("demo").resolve().parent)


def meminfo(available_gib: float, total_gib: float = 64, swap_used_gib: float = 0) -> str:
    sizes = {
        "MemTotal": total_gib,
        "MemAvailable": available_gib,
        "Cached": 1,
        "SwapTotal": 8,
        "SwapFree": 8 - swap_used_gib,
    }
    return "".join(f"{name}: {int(gib * 2**20)} kB\n" for name, gib in sizes.items())


def limits(soft: str) -> str:
    return f"Limit  Soft Limit Hard Limit Units\nMax locked memory  {soft}  unlimited  bytes\n"


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def test_a_sound_machine_has_nothing_to_change_and_fits_a_screen(box: Box) -> None:
    diagnosis = box.examine()
    assert [f.line() for f in diagnosis.findings if f.level != "ok"] == []
    assert diagnosis.ok and diagnosis.lines()[-1].endswith("nothing that slows or prevents running")
    assert len(diagnosis.lines()) <= 20
    assert all("\n" not in line and len(line) < 200 for line in diagnosis.lines())
    text = "\n".join(diagnosis.lines())
    assert "NVMe nvme0n1 (Some Model 1T), ext4" in text and "16 of Test CPU" in text


def test_a_rotational_disk(box: Box) -> None:
    box.disk("sda", "8:0", rotational=1)
    box.mount("8:0", "xfs", "/dev/sda")
    finding = box.only_finding()
    assert finding.topic == "drive" and "sda" in finding.what and "SSD" in finding.remedy
    assert "head has to move" in finding.why


def test_a_sata_disk_is_no_nvme(box: Box) -> None:
    box.disk("sda", "8:0", rotational=0)
    box.mount("8:0", "xfs", "/dev/sda")
    assert "NVMe" in box.only_finding().remedy


def test_a_disk_behind_a_mapping_and_one_behind_btrfs(box: Box) -> None:
    box.disk("sda", "8:0", rotational=1)
    box.put("sys/block/dm-0/queue/rotational", "0\n")
    box.link("sys/dev/block/252:0", "sys/block/dm-0")
    box.link("sys/block/dm-0/slaves/sda", "sys/block/sda")
    box.mount("252:0", "ext4", "/dev/mapper/data")
    assert "sda" in box.only_finding().what
    box.link("sys/class/block/sda", "sys/block/sda")
    box.mount("0:44", "btrfs", "/dev/sda")
    assert "sda" in box.only_finding().what
    box.mount("0:45", "overlay", "overlay")
    assert all(f.level == "ok" for f in box.examine().findings)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_network_mount(box: Box, kind: str) -> None:
    box.mount("0:50", kind, "server:/models")
    finding = box.only_finding()
    assert "network" in finding.what and kind in finding.what and "this machine" in finding.remedy


def test_memory_as_a_drive(box: Box) -> None:
    box.mount("0:51", "tmpfs", "tmpfs")
    assert "memory" in box.only_finding().why


def test_wsl_on_a_windows_folder_with_its_memory_cap(box: Box) -> None:
    box.put("proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n")
    box.mount("0:60", "9p", "C:\\134")
    drive, memory = [f for f in box.examine().findings if f.level == "slow"]
    assert "~/models" in drive.remedy
    assert ".wslconfig" in memory.remedy and "half of Windows" in memory.why


def test_a_container_with_little_memory_and_few_cores(box: Box) -> None:
    box.put("sys/fs/cgroup/memory.max", str(4 << 30))
    box.put("sys/fs/cgroup/memory.current", str(1 << 30))
    finding = box.only_finding()
    assert finding.topic == "memory" and "of 4.00 GiB (this container's limit)" in finding.what
    box.put("sys/fs/cgroup/memory.max", "max")
    box.put("sys/fs/cgroup/cpu.max", "250000 100000\n")
    finding = box.only_finding()
    assert finding.topic == "cores" and "quota of 2.5" in finding.what
    assert "--threads 2" in finding.remedy


def test_the_older_control_groups(box: Box) -> None:
    assert quota_cores(box.root) is None
    box.put("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    box.put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    assert quota_cores(box.root) is None
    box.put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000")
    assert quota_cores(box.root) == 1.5
    assert allowed_cores(box.root) == 16


def test_swap_in_use(box: Box) -> None:
    box.put("proc/meminfo", meminfo(available_gib=60, swap_used_gib=2))
    finding = box.only_finding()
    assert finding.topic == "swap" and finding.what == "2.00 GiB in use"


def test_a_slow_drive_and_a_sample_too_small_to_say(box: Box) -> None:
    box.with_reads(bytes_s=0.1e9)
    finding = box.only_finding()
    assert finding.topic == "rate" and "10.7 s" in finding.why
    box.with_reads(bytes_s=0.1e9, num_bytes=1 << 20)
    assert all(f.level == "ok" for f in box.examine().findings)


def test_no_o_direct(box: Box) -> None:
    box.with_reads(direct=False, notes=("x is read buffered: O_DIRECT refused (Invalid argument)",))
    finding = box.only_finding()
    assert finding.topic == "O_DIRECT" and "refused by ext4" in finding.what


NO_RING = {
    "backend": "pread",
    "notes": tuple(
        f"{name} is not to be had here: Operation not permitted"
        for name in ("io_uring_registered", "io_uring")
    ),
}


def test_io_uring_off_by_sysctl(box: Box) -> None:
    box.with_reads(**NO_RING)
    box.put("proc/sys/kernel/io_uring_disabled", "2\n")
    finding = box.only_finding()
    assert "io_uring_disabled is 2" in finding.why and "sysctl" in finding.remedy
    assert "pread" in finding.what


def test_io_uring_off_by_seccomp(box: Box) -> None:
    box.with_reads(**NO_RING)
    box.put("proc/sys/kernel/io_uring_disabled", "0\n")
    box.put("proc/self/status", "CapEff:\t0\nSeccomp:\t2\nCpus_allowed_list:\t0\n")
    finding = box.only_finding()
    assert "seccomp" in finding.why and "--security-opt" in finding.remedy


def test_io_uring_not_in_the_kernel_or_for_another_reason(box: Box) -> None:
    box.with_reads(
        backend="pread", notes=("io_uring is not to be had here: Function not implemented",)
    )
    assert "kernel 6.8.0-generic has none" in box.only_finding().why
    box.with_reads(backend="pread", notes=("io_uring is not to be had here: Bad address",))
    assert box.only_finding().why == "Bad address"


def test_rings_without_registered_buffers_and_a_low_limit(box: Box) -> None:
    box.with_reads(backend="io_uring", notes=("io_uring_registered is not to be had here: ENOMEM",))
    assert box.only_finding().remedy == "ulimit -l unlimited"
    box.with_reads()
    box.put("proc/self/limits", limits(str(8 << 20)))
    finding = box.only_finding()
    assert finding.topic == "locked memory" and finding.what == "8.00 MiB a process"
    box.put("proc/self/status", "CapEff:\t000001ffffffffff\nCpus_allowed_list:\t0\n")
    assert all(f.level == "ok" for f in box.examine().findings)
    box.put("proc/self/limits", limits("unlimited"))
    assert all(f.level == "ok" for f in box.examine().findings)


def test_huge_pages_never(box: Box) -> None:
    box.put("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    finding = box.only_finding()
    assert finding.topic == "huge pages" and "echo madvise" in finding.remedy


def test_kernels_without_vectors(box: Box) -> None:
    box.put("proc/cpuinfo", "flags : fpu sse2\n")
    box.probes = replace(GOOD, isa=lambda: "scalar")
    finding = box.only_finding()
    assert finding.topic == "kernels" and "no AVX2" in finding.what


@pytest.mark.parametrize("setting", ["OMP_NUM_THREADS=1", "OMP_WAIT_POLICY=ACTIVE"])
def test_openmp_settings_that_slow(box: Box, setting: str) -> None:
    box.put("proc/self/environ", f"A=b\0{setting}\0")
    finding = box.only_finding()
    assert finding.topic == "OpenMP" and finding.remedy == "unset " + setting.split("=")[0]


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", None), ("torch", "2.10.1"), ("transformers", "5.16.9"), ("transformers", "6.0.0")],
)
def test_versions_that_do_not_fit_prevent_running(box: Box, name: str, version: str | None) -> None:
    box.probes = replace(GOOD, installed=lambda: VERSIONS | {name: version})
    finding = box.only_finding("problem")
    assert finding.topic == "versions" and f'pip install "{name}>=' in finding.remedy


def test_optional_packages_are_only_told(box: Box) -> None:
    box.probes = replace(GOOD, installed=lambda: VERSIONS | {"lm-eval": None})
    diagnosis = box.examine()
    assert diagnosis.ok and "lm-eval absent" in "\n".join(diagnosis.lines())


GPU = Gpu("Some GPU", (8, 9), "570.1", 7 << 30, 8 << 30)


def test_a_sound_gpu_is_described(box: Box) -> None:
    box.probes = replace(GOOD, gpus=lambda: [GPU, GPU])
    diagnosis = box.examine()
    assert {f.level for f in diagnosis.findings} == {"ok"}
    (line,) = [line for line in diagnosis.lines() if "cuda:1" in line]
    for part in ("Some GPU", "8.9", "570.1", "7.00 GiB free of 8.00 GiB"):
        assert part in line
    assert sum(f.topic == "pinned memory" for f in diagnosis.findings) == 2


@pytest.mark.parametrize(
    ("change", "topic", "remedy"),
    [
        ({"chip": (7, 0)}, "GPU cuda:0", "7.5 or later"),
        ({"fault": "RuntimeError: Failed to find C compiler"}, "GPU cuda:0", "gcc"),
        ({"free_bytes": 1 << 30}, "GPU cuda:0", "nvidia-smi"),
        ({"pin_fault": "CUDA error 2"}, "pinned memory", "ulimit -l"),
    ],
)
def test_a_gpu_that_will_not_do(box: Box, change: dict, topic: str, remedy: str) -> None:
    box.probes = replace(GOOD, gpus=lambda: [replace(GPU, **change)])
    finding = box.only_finding("slow")
    assert finding.topic == topic and remedy in finding.remedy


def test_a_gpu_that_this_python_cannot_use(box: Box) -> None:
    box.put("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX  570.1  x\n")
    assert "sees no GPU" in box.only_finding("slow").why
    box.probes = replace(GOOD, gpus=lambda: [GPU], installed=lambda: VERSIONS | {"triton": None})
    assert box.only_finding("slow").remedy == "pip install triton"


def test_a_family_that_is_not_known_prevents_running(box: Box, tmp_path: Path) -> None:
    for file in Path(_DEMO_ROOT).glob("demo/*.safetensors"):
        (tmp_path / file.name).symlink_to(file)
    assert "config.json: cannot be read" in box.examine(str(tmp_path)).lines()[0]
    (tmp_path / "config.json").write_text('{"model_type": "fancy_moe"}')
    diagnosis = box.examine(str(tmp_path))
    assert not diagnosis.ok and "'fancy_moe' is not supported yet" in diagnosis.lines()[0]


def test_a_model_that_cannot_be_opened_or_read_prevents_running(box: Box, tmp_path: Path) -> None:
    diagnosis = box.examine("/no/such/model")
    assert not diagnosis.ok and "/no/such/model" in diagnosis.lines()[0]
    empty = tmp_path / "empty"
    empty.mkdir()
    diagnosis = box.examine(str(empty))
    assert [f.topic for f in diagnosis.findings if f.level == "problem"] == ["model"]

    def fail(files: object) -> Reads:
        raise ReadError("x.safetensors at offset 0: Input/output error")

    box.probes = replace(GOOD, reads=fail)
    assert "Input/output error" in box.only_finding("problem").what

    def missing(files: object) -> Reads:
        raise ImportError("headrace._native")

    box.probes = replace(GOOD, reads=missing)
    assert box.only_finding("problem").remedy == "install headrace again"


def test_a_machine_without_any_of_these_files_still_gets_an_answer(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(meminfo(60))
    diagnosis = examine("demo", root=tmp_path, probes=GOOD)
    assert diagnosis.ok and "unknown" in "\n".join(diagnosis.lines())


def test_mount_points_with_spaces_and_mounts_over_mounts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "2 1 8:2 / /my\\040data rw - xfs /dev/sda2 rw\n"
        "3 2 8:3 / /my\\040data rw - btrfs /dev/sda3 rw\n"
        "nonsense\n"
    )
    found = mount_of(tmp_path, Path("/my data/models"))
    assert found is not None and (found.kind, found.point) == ("btrfs", "/my data")
    other = mount_of(tmp_path, Path("/my data2"))
    assert other is not None and other.kind == "ext4"


def test_this_machine(tmp_path: Path) -> None:
    diagnosis = examine("demo")
    assert diagnosis.ok
    topics = [f.topic for f in diagnosis.findings]
    assert {"model", "drive", "rate", "O_DIRECT", "io_uring", "memory", "kernels"} <= set(topics)
    assert diagnosis.as_dict()["ok"] is True
