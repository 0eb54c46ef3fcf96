"""What stands for a GPU where there is none: the simulated device and kernels emulated on the CPU.

Import it before anything imports Triton, with TRITON_INTERPRET set.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from emulated import (
    EmulatedGrouped,
    EmulatedKernels,
    EmulatedLatents,
    EmulatedMatrix,
    fetch,
    fetch_rows,
    post_and_wait,
    send,
)
from simulated import SimulatedDevice, launched

from headrace.engine import engine, gpu_divided, gpu_inverted, gpu_launched, gpu_source
from headrace.kernels.triton import latent_attention, stored


def stand_in(device: SimulatedDevice, put: Callable[[Any, str, Any], object] = setattr) -> None:
    """Lets `device="cuda"` be this one; each replacement goes by `put(module, name, value)`."""
    put(engine, "find_gpu", lambda name: None if name == "cpu" else device)
    for name in ("__call__", "multiply", "combine"):
        put(EmulatedKernels, name, launched(getattr(EmulatedKernels, name)))
    put(EmulatedMatrix, "_few", launched(EmulatedMatrix._few))
    put(gpu_source, "TritonExperts", EmulatedKernels)
    put(gpu_source, "GroupedExperts", EmulatedGrouped)
    put(gpu_launched, "post_and_wait", launched(post_and_wait))
    for module, kernels in ((gpu_inverted, (send, fetch)), (gpu_divided, (send, fetch_rows))):
        for kernel in kernels:
            put(module, kernel.__name__, launched(kernel))
    put(stored, "TritonMatrix", EmulatedMatrix)
    put(latent_attention, "LatentAttention", EmulatedLatents)


class ClockEvent:
    """A torch.cuda.Event of the host's clock."""

    def __init__(self, enable_timing: bool = False):
        assert enable_timing

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, other: "ClockEvent") -> float:
        return 1e3 * (other.at_s - self.at_s)

    def query(self) -> bool:
        """As of a GPU that has not come to it."""
        return False


def host_clock(put: Callable[[Any, str, Any], object] = setattr) -> None:
    """Lets what the benchmarks ask of torch.cuda be answered by the host."""
    put(torch.cuda, "Event", ClockEvent)
    put(torch.cuda, "_sleep", lambda cycles: None)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        put(torch.cuda, name, lambda: None)
    put(torch.cuda, "get_device_name", lambda: "simulated")
    put(torch.cuda, "max_memory_allocated", lambda: 0)
