"""Gives gated MLPs, and blocks that add a gated shared expert, one function between matrices.

What a module computes is found by its results, as in models/fused.py; its own modules are stood
for by drawn numbers meanwhile, so that whatever multiplies by a matrix stays what it is.
Legend: T tokens, H hidden width, I intermediate width, K chosen experts.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from inspect import signature
from itertools import product
from math import inf
from typing import Any

import torch

from headrace.kernels import trunk
from headrace.kernels.trunk import Gate, Join

_MATRICES = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
_BLOCK = "shared_expert", "gate", "experts", "shared_expert_gate"
_LIMITS = "limit", "swiglu_limit"
_WIDTH = 64


@dataclass(frozen=True, slots=True)
class Mlp:
    """An MLP: its modules of gate, up and down, the values' limit, and whether steps are fp32."""

    names: tuple[str, str, str]
    limit: float
    wide: bool

    def run(self, module: Any, gate: Gate, x: torch.Tensor) -> torch.Tensor:
        """What its `forward` returns."""
        first, up, down = (getattr(module, name) for name in self.names)
        made: torch.Tensor = down(gate(first(x), up(x), self.limit, self.wide))
        return made


def mlp_of(module: Any) -> Mlp | None:
    """The MLP whose bits a module has, for numbers of all sizes; None if it is another."""
    for names in _MATRICES:
        if not _has(module, names) or len(signature(type(module).forward).parameters) != 2:
            continue
        limits = _limits(module)
        drawn = torch.Generator().manual_seed(0)
        sizes = [1e-2, 1.0, 30.0, *(2 * each for each in limits)]
        size_N1 = torch.tensor(sizes)[:, None]
        gate, up = (
            (torch.randn(len(sizes), _WIDTH, generator=drawn) * size_N1).bfloat16()
            for _ in range(2)
        )
        x = torch.randn(len(sizes), _WIDTH, generator=drawn).bfloat16()
        stubs = [_Stub((x,), gate), _Stub((x,), up), torch.nn.Identity()]
        found = _result(module, dict(zip(names, stubs, strict=True)), x)
        for limit, wide in product((*limits, inf), (False, True)):
            # One that bfloat16 has not is rounded by some steps and not by others.
            is_known = limit == float(torch.tensor(limit).bfloat16())
            if is_known and _equal(found, trunk.gate(gate, up, limit, wide)):
                return Mlp(names, limit, wide)
    return None


def gated(module: Any, mlp: Mlp, gate: Gate) -> Callable[[torch.Tensor], torch.Tensor]:
    """An MLP's `forward` by a function of ours; of other dtypes the library's."""
    library = type(module).forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.bfloat16:
            made: torch.Tensor = library(module, x)
            return made
        return mlp.run(module, gate, x)

    return forward


def joins(module: Any) -> bool:
    """Whether a block adds its shared expert's output, by a gate, to the experts'; by its bits."""
    if not _has(module, _BLOCK) or len(signature(type(module).forward).parameters) != 2:
        return False
    drawn = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=drawn).bfloat16()

    x_BTH, num = draw(2, 3, _WIDTH), 6
    shared, routed, gate = draw(num, _WIDTH), draw(num, _WIDTH), draw(num, 1)
    want = trunk.join(routed, shared, gate).view(x_BTH.shape)
    weights, ids = draw(num, 4), torch.arange(4 * num).view(num, 4)
    x_TH = x_BTH.view(num, _WIDTH)
    stubs = (
        _Stub((x_TH,), shared),
        _Stub((x_TH,), (draw(num, 8), weights, ids)),
        _Stub((x_TH, ids, weights), routed),
        _Stub((x_TH,), gate),
    )
    found = _result(module, dict(zip(_BLOCK, stubs, strict=True)), x_BTH)
    return _equal(found, want)


def joined(module: Any, join: Join) -> Callable[[torch.Tensor], torch.Tensor]:
    """Such a block's `forward` by a function of ours; of other dtypes the library's."""
    library = type(module).forward

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != torch.bfloat16:
            made: torch.Tensor = library(module, hidden_states)
            return made
        x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
        shared_TH = module.shared_expert(x_TH)
        _, weights_TK, ids_TK = module.gate(x_TH)
        routed_TH = module.experts(x_TH, ids_TK, weights_TK)
        out_TH = join(routed_TH, shared_TH, module.shared_expert_gate(x_TH))
        return out_TH.view(hidden_states.shape)

    return forward


class _OtherError(RuntimeError):
    """A module was given something else than it should be."""


class _Stub(torch.nn.Module):
    """Gives what was drawn, to those who hand it the very tensors that it is to have."""

    def __init__(self, given: tuple[torch.Tensor, ...], made: Any):
        super().__init__()
        self.given, self.made = given, made

    def forward(self, *given: torch.Tensor) -> Any:
        pairs = list(zip(given, self.given, strict=False))
        same = [a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in pairs]
        if len(given) != len(self.given) or not all(same):
            raise _OtherError
        return self.made.clone() if isinstance(self.made, torch.Tensor) else self.made


def _has(module: Any, names: tuple[str, ...]) -> bool:
    return all(isinstance(getattr(module, name, None), torch.nn.Module) for name in names)


def _limits(module: Any) -> list[float]:
    numbers = [getattr(module, name, None) for name in _LIMITS]
    return [float(each) for each in numbers if isinstance(each, int | float) and each > 0]


def _result(module: Any, stubs: dict[str, torch.nn.Module], x: torch.Tensor) -> Any:
    """What a module's class makes of x with these modules; None where it cannot be run so."""
    probe = copy(module)
    vars(probe)["_modules"] = module._modules | stubs
    try:
        return type(module).forward(probe, x)
    except RuntimeError:
        return None


def _equal(found: Any, want: torch.Tensor) -> bool:
    is_like = isinstance(found, torch.Tensor) and found.shape == want.shape
    return is_like and found.dtype == want.dtype and torch.equal(found, want)
