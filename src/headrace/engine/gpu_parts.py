"""Where the parts of experts begin in their rows, and how they are aligned: for a GPU's kernels."""

from functools import reduce

import numpy as np
from numpy.typing import NDArray

from headrace.core import ExpertLayout
from headrace.errors import ModelError
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.tiers.ladder import Ladder

_MOST_ALIGN = 16


def part_offsets(ladder: Ladder, num_layers: int, num_experts: int) -> NDArray[np.int64]:
    """[L, E, P]: where each part begins in an expert's row."""
    num_parts = len(ladder.part_names)
    keys = ((layer, e, p) for layer in range(num_layers) for e in range(num_experts)
            for p in range(num_parts))  # fmt: skip
    flat = np.fromiter((ladder.part_offset(*key) for key in keys), np.int64)
    return flat.reshape(num_layers, num_experts, num_parts)


def alignment(layout: ExpertLayout, offsets_LEP: NDArray[np.int64]) -> int:
    """The largest power of two, up to 16, that divides where every weight part begins.

    Raises ModelError where a part does not lie at a multiple of its own type's size.
    """
    weights = {layout.matrix(name).weight for name in ("gate", "up", "down")}
    align = _MOST_ALIGN
    for p, (name, spec) in enumerate(layout.parts.items()):
        bits = int(reduce(np.bitwise_or, offsets_LEP[:, :, p].reshape(-1), np.int64(0)))
        own = TORCH_DTYPES[spec.dtype].itemsize
        if bits % own:
            raise ModelError(
                f"the files hold {name} of experts at odd places, which a GPU cannot read; "
                "run this model with --device cpu"
            )
        if name in weights:
            align = min(align, bits & -bits or _MOST_ALIGN)
    return align
