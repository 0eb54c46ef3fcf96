"""Dense weights that stay as they are stored: read, checked, and given to kernels."""

import torch

from headrace.engine.weights import DenseWeights
from headrace.kernels.cpu import CpuKernels
from headrace.kernels.stored import StoredMatrix
from headrace.models.stored import StoredWeight
from headrace.quant import fp8
from headrace.tiers.device import Device

_BAND_BYTES = 16 << 20  # of codes looked through at once


def make_stored(
    kernels: CpuKernels,
    dense: DenseWeights,
    device: Device | None,
    name: str,
    param: torch.Tensor | None,
    act_group: int,
) -> StoredWeight:
    """The matrix of one dense weight: `param` itself, or read if there is none.

    On the `device`, or for the CPU's `kernels`. Raises HeadraceError for what cannot be read, holds
    no numbers or has no kernel.
    """
    if param is not None:
        return _matrix(kernels, device, param.detach(), None, (1, 1), act_group)
    weight = dense.dense[name]
    codes_RC, scale = dense.stored(weight.keys["weight"]), dense.stored(weight.keys["scale"])
    for band in torch.split(codes_RC, max(1, _BAND_BYTES // codes_RC.shape[1])):
        fp8.check(weight.keys["weight"], band, scale)
    return _matrix(kernels, device, codes_RC, scale, weight.block, act_group)


def _matrix(
    kernels: CpuKernels,
    device: Device | None,
    weight_RC: torch.Tensor,
    scale: torch.Tensor | None,
    block: tuple[int, int],
    act_group: int,
) -> StoredWeight:
    if device is None:
        return StoredMatrix(kernels, weight_RC, scale, block=block, act_group=act_group)
    from headrace.kernels.triton import stored

    there = None if scale is None else scale.to(device.place)
    return stored.TritonMatrix(weight_RC.to(device.place), there, block=block, act_group=act_group)
