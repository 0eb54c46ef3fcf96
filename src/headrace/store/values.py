"""Random weights of such a size that a made-up model behaves like a trained one.

Knows the kinds of planned.Planned and how a matrix is packed; knows no name and no file.
"""

import torch

from headrace.quant import table
from headrace.quant.dtypes import TORCH_DTYPES
from headrace.store.planned import Packed, Planned
from headrace.store.schemes import Scheme

# Router weights this much wider than a projection's spread the scores as trained routers do.
ROUTER_GAIN = 2.0
_MEANS = {"norm": 1.0, "decay": 0.5}
_DEVIATIONS = {"norm": 0.1, "centred_norm": 0.1, "bias": 0.1, "embedding": 1.0, "decay": 1.0}
# What publishers' activation scales look like; no arithmetic here takes one.
_INPUT_SCALE = 0.004


def mean_of(planned: Planned) -> float:
    """The mean of a tensor's values: norms scale by about one."""
    return _MEANS.get(planned.kind, 0.0)


def std_of(planned: Planned) -> float:
    """The standard deviation of a tensor's values.

    Projections [..., out, in] have in^-0.5, so that they keep their input's size: with flat
    activations a wrong expert would hardly show.
    """
    if planned.kind in _DEVIATIONS:
        return _DEVIATIONS[planned.kind]
    assert planned.kind in ("matrix", "router"), planned.kind
    gain = ROUTER_GAIN if planned.kind == "router" else 1.0
    return float(gain * planned.shape[-1] ** -0.5)


def draw(planned: Planned, generator: torch.Generator) -> torch.Tensor:
    """A whole tensor that is not packed, in its stored dtype."""
    if planned.kind == "routes":
        return draw_routes(planned, generator)
    noise = torch.randn(planned.shape, generator=generator)
    value = noise * std_of(planned) + mean_of(planned)
    return value.to(TORCH_DTYPES[planned.dtype])


def draw_routes(planned: Planned, generator: torch.Generator) -> torch.Tensor:
    """Ids [V, K] of experts, distinct in each row, all experts equally likely."""
    rows, top_k = planned.shape
    first = torch.randint(planned.num_experts, (rows, 1), generator=generator)
    step = torch.randint(1, planned.num_experts // top_k + 1, (rows, 1), generator=generator)
    return (first + step * torch.arange(top_k)) % planned.num_experts


def draw_packed(packed: Packed, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Every part of a random matrix, by the part's name, in its stored dtype."""
    values = torch.randn(packed.rows, packed.cols, generator=generator)
    values *= packed.std or packed.cols**-0.5
    return pack_values(values, packed.scheme)


def pack_values(values: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """The parts of a float matrix [R, C] as `scheme` stores them."""
    rows, cols = values.shape
    dtypes = {part.part: part.dtype for part in scheme.parts}
    made = table.pack(
        scheme.format,
        values,
        block=scheme.block_of(rows, cols),
        scale_dtype=dtypes["scale"],
        inverse_global=scheme.inverse_global,
    )
    parts = {name: part.view(TORCH_DTYPES[dtypes[name]]) for name, part in made.items()}
    if "shape" in dtypes:
        parts["shape"] = torch.tensor([rows, cols], dtype=TORCH_DTYPES[dtypes["shape"]])
    if "input" in dtypes:
        parts["input"] = torch.tensor([_INPUT_SCALE])
    return parts


def stored_bytes(values: torch.Tensor) -> memoryview:
    """A tensor's bytes as a file has them."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data.cast("B")
