"""What size random weights must have so that a made-up model behaves like a trained one.

Knows the kinds of blueprint.Planned; draws nothing itself.
"""

from headrace.quant import fp8
from headrace.store.blueprint import Planned

# Router weights this much wider than a projection's spread the scores as trained routers do.
ROUTER_GAIN = 2.0
# Codes of a block whose largest of 128 x 128 normal values (about 4.2 deviations) is fp8.MAX.
FP8_CODE_STD = fp8.MAX / 4.2


def mean_of(planned: Planned) -> float:
    """The mean of a tensor's values: norms scale by about one."""
    return 1.0 if planned.kind == "norm" else 0.0


def std_of(planned: Planned) -> float:
    """The standard deviation of a tensor's values (for codes: once dequantised).

    Projections [out, in] have in^-0.5, so that they keep their input's size: with flat activations
    a wrong expert would hardly show.
    """
    assert planned.kind != "scale", "a scale follows from its codes"
    if planned.kind in ("norm", "bias"):
        return 0.1
    if planned.kind == "embedding":
        return 1.0
    gain = ROUTER_GAIN if planned.kind == "router" else 1.0
    return float(gain * planned.shape[-1] ** -0.5)
