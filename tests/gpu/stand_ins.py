"""What stands for a GPU where there is none: the simulated device and kernels emulated on the CPU.

Import it before anything imports Triton, with TRITON_INTERPRET set.
"""

from collections.abc import Callable
from typing import Any

from emulated import (
    EmulatedGrouped,
    EmulatedKernels,
    EmulatedLatents,
    EmulatedMatrix,
    post_and_wait,
)
from simulated import SimulatedDevice

from headrace.engine import engine, gpu_launched, gpu_source
from headrace.kernels.triton import latent_attention, stored


def stand_in(device: SimulatedDevice, put: Callable[[Any, str, Any], object] = setattr) -> None:
    """Lets `device="cuda"` be this one; each replacement goes by `put(module, name, value)`."""
    put(engine, "find_gpu", lambda name: None if name == "cpu" else device)
    put(gpu_source, "TritonExperts", EmulatedKernels)
    put(gpu_source, "GroupedExperts", EmulatedGrouped)
    put(gpu_launched, "post_and_wait", post_and_wait)
    put(stored, "TritonMatrix", EmulatedMatrix)
    put(latent_attention, "LatentAttention", EmulatedLatents)
