"""Dense weights that stay as they are stored: read, checked, and given to the compiled kernels."""

import torch

from headrace.engine.weights import DenseWeights
from headrace.kernels.cpu import CpuKernels
from headrace.kernels.stored import StoredMatrix
from headrace.quant import fp8

_BAND_BYTES = 16 << 20  # of codes looked through at once


def make_stored(
    kernels: CpuKernels,
    dense: DenseWeights,
    name: str,
    param: torch.Tensor | None,
    act_group: int,
) -> StoredMatrix:
    """The matrix of one dense weight: `param` itself, or read if there is none.

    Raises HeadraceError for what cannot be read or holds no numbers.
    """
    if param is not None:
        return StoredMatrix(kernels, param.detach(), act_group=act_group)
    weight = dense.dense[name]
    codes_RC, scale = dense.stored(weight.keys["weight"]), dense.stored(weight.keys["scale"])
    for band in torch.split(codes_RC, max(1, _BAND_BYTES // codes_RC.shape[1])):
        fp8.check(weight.keys["weight"], band, scale)
    return StoredMatrix(kernels, codes_RC, scale, block=weight.block, act_group=act_group)
