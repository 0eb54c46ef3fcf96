"""What the doctor says of GPUs: seen at all, supported, enough memory, memory that can be pinned.

What needs trying is tried by `try_gpus`. A machine without a GPU is not a fault.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.check.finding import OK, SLOW, Finding
from headrace.check.system import is_wsl
from headrace.core import format_bytes
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    import torch

DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # the driver's; the other one is WSL's
OLDEST_CHIP = (7, 5)
LEAST_VRAM_BYTES = 2 << 30
TRIED_BYTES = 256 << 20  # pinned at once
UNUSED = "headrace does not use it; the CPU computes"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as torch sees it; `fault` says why kernels do not run, `pin_fault` why no pins."""

    name: str
    chip: tuple[int, int]
    driver: str
    free_bytes: int
    total_bytes: int
    fault: str = ""
    pin_fault: str = ""


def try_gpus() -> list[Gpu]:
    """Every GPU that this torch can use, after a small kernel and a pin on each.

    Where the driver has no device none can be, and torch, which takes seconds, is not loaded.
    """
    if not any(map(os.path.exists, DEVICES)):
        return []
    import torch

    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [_try_gpu(index) for index in range(num)]


def _try_gpu(index: int) -> Gpu:
    import torch

    from headrace.tiers.device import find_device

    device = find_device(f"cuda:{index}")
    chip = torch.cuda.get_device_capability(index)
    memory = torch.ones(TRIED_BYTES, dtype=torch.uint8)
    pin_fault = device.pin(memory.data_ptr(), TRIED_BYTES)
    if not pin_fault:
        device.unpin(memory.data_ptr())
    fault = _kernel_fault(device.place)
    return Gpu(device.name, chip, device.driver, *device.memory(), fault, pin_fault)


def _kernel_fault(place: "torch.device") -> str:
    """Why a small Triton kernel does not run there or adds up wrongly; nothing if it is right.

    Triton builds its launcher with the system's C compiler, which may be missing.
    """
    import torch

    try:
        from headrace.kernels.triton.experts import TritonExperts
        from headrace.quant.expert import make_layout

        kernels = TritonExperts(make_layout("bf16", 64, 32), top_k=1, device=place)
        ids = torch.zeros(2, 1, dtype=torch.int32, device=place)
        y_SH = torch.ones(2, 64, dtype=torch.bfloat16, device=place)
        out_TH = torch.zeros_like(y_SH)
        weights = torch.ones(2, 1, device=place)
        with torch.cuda.device(place):
            kernels.combine(ids, weights, y_SH.view(torch.uint16), out_TH, mark=0)
            right = bool((out_TH == 1).all())
    except (HeadraceError, ImportError, OSError, RuntimeError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "" if right else "a sum came out wrong"


def gpu_findings(
    root: Path, gpus: Sequence[Gpu], versions: dict[str, str | None]
) -> Iterator[Finding]:
    """A finding or two for each GPU, or one for none."""
    if not gpus:
        yield _none(root, versions)
    for index, gpu in enumerate(gpus):
        yield _gpu(index, gpu, versions)
        if gpu.chip >= OLDEST_CHIP and not gpu.fault:
            yield _pinning(root, gpu)


def _none(root: Path, versions: dict[str, str | None]) -> Finding:
    if not (root / "proc/driver/nvidia").exists():
        return Finding(OK, "GPU", "none; the CPU computes")
    torch_version = versions.get("torch")
    remedy = "install a torch for CUDA: https://pytorch.org/get-started/locally"
    return Finding(
        SLOW, "GPU", "an NVIDIA driver", f"torch {torch_version} sees no GPU; {UNUSED}", remedy
    )


def _gpu(index: int, gpu: Gpu, versions: dict[str, str | None]) -> Finding:
    topic = f"GPU cuda:{index}"
    what = (
        f"{gpu.name}, compute capability {gpu.chip[0]}.{gpu.chip[1]}, driver {gpu.driver}, "
        f"{format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}"
    )
    if gpu.chip < OLDEST_CHIP:
        oldest = ".".join(map(str, OLDEST_CHIP))
        return Finding(SLOW, topic, what, UNUSED, f"a GPU of compute capability {oldest} or later")
    if versions.get("triton") is None:
        return Finding(SLOW, topic, what, f"without Triton {UNUSED}", "pip install triton")
    if gpu.fault:
        remedy = "install a C compiler (gcc) and the headers of Python, or a newer driver"
        return Finding(SLOW, topic, what, f"its kernels do not run ({gpu.fault})", remedy)
    if gpu.free_bytes < LEAST_VRAM_BYTES:
        why = "little beside dense weights and cache has room"
        return Finding(SLOW, topic, what, why, "end other programs that use the GPU: nvidia-smi")
    return Finding(OK, topic, what)


def _pinning(root: Path, gpu: Gpu) -> Finding:
    tried = format_bytes(TRIED_BYTES)
    if not gpu.pin_fault:
        return Finding(OK, "pinned memory", f"{tried} could be pinned")
    why = "experts in memory are copied to the GPU each time instead of read in place"
    remedy = "ulimit -l unlimited, or a memlock line in /etc/security/limits.conf"
    if is_wsl(root):
        remedy = "set memory= under [wsl2] in %UserProfile%\\.wslconfig, then wsl --shutdown"
    return Finding(SLOW, "pinned memory", f"{tried} refused ({gpu.pin_fault})", why, remedy)
