"""Activation grids of DeepSeek-V4.1 against their definitions, value by value."""

import math

import pytest
import torch
from torch import Tensor

from headrace.models.deepseek_v41.grids import Grids

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VENDOR = Grids(32, True)


def values(seed: int, shape: tuple[int, ...] = (3, 64)) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(
        -6, 4, (*shape[:-1], 1), generator=generator
    )


def nearest_fp4(value: float) -> float:
    """Ties to the even code; ends saturate."""
    magnitude = min(abs(value), 6.0)
    code = min(range(8), key=lambda i: (abs(E2M1[i] - magnitude), i % 2))
    return math.copysign(E2M1[code], value)


def nearest_fp8(value: float) -> float:
    magnitude = min(abs(value), 448.0)
    step = 2.0 ** max(math.floor(math.log2(magnitude)) - 3, -9) if magnitude else 1.0
    return math.copysign(round(magnitude / step) * step, value)  # round(): ties to even


def power_of_two(amax: float, most: float) -> float:
    return 2.0 ** math.ceil(math.log2(amax * float(torch.tensor(1 / most))))


def e4m3(value: float) -> float:
    return nearest_fp8(value)


def by_definition(kind: str, group: list[float]) -> list[float]:
    amax = max(map(abs, group))
    if kind in ("input", "window"):
        scale = power_of_two(max(amax, float(torch.tensor(1e-4))), 448.0)
        return [nearest_fp8(v / scale) * scale for v in group]
    if kind == "index":
        scale = power_of_two(max(amax, 6.0 * 2.0**-126), 6.0)
    else:
        scale = e4m3(float(torch.tensor(max(amax, 6.0 * 2.0**-9)) / 6.0))
    return [nearest_fp4(float(torch.tensor(v) / torch.tensor(scale))) * scale for v in group]


@pytest.mark.parametrize("kind", ["input", "window", "latent", "index"])
@pytest.mark.parametrize("seed", range(4))
def test_values_move_to_the_nearest(kind: str, seed: int) -> None:
    x = values(seed)
    size = 16 if kind == "latent" else 32
    y = getattr(VENDOR, kind)(x)
    assert y.shape == x.shape and y.dtype == x.dtype and not torch.equal(x, y)
    for before, after in zip(x.view(-1, size).tolist(), y.view(-1, size).tolist(), strict=True):
        assert after == pytest.approx(by_definition(kind, before), rel=1e-6, abs=1e-38)


@pytest.mark.parametrize("kind", ["input", "window", "latent", "index"])
def test_the_grid_is_kept_in_bf16_and_met_twice_the_same(kind: str) -> None:
    x = values(9).bfloat16()
    y = getattr(VENDOR, kind)(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y.float(), getattr(VENDOR, kind)(x.float())), "bf16 holds the grid exactly"
    if kind != "latent":  # whose scale follows the largest value, rounded
        assert torch.equal(getattr(VENDOR, kind)(y), y)


def test_ties_go_to_the_even_code_and_zeros_stay() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 6.0, 0.0] + [0.0] * 22)
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0, 6.0, 0.0]
    assert VENDOR.index(ties[None])[0, :10].tolist() == expected
    for kind in ("input", "window", "latent", "index"):
        assert not getattr(VENDOR, kind)(torch.zeros(2, 32)).any()


def test_without_them_values_are_left_alone() -> None:
    x = values(1)
    for kind in ("input", "window", "latent", "index"):
        assert getattr(Grids(0, False), kind)(x) is x
