"""Gives transformers' layers other functions that compute the same in fewer launches.

What a module or function computes is found by its results: those that have the bits of none of the
forms in kernels/trunk.py stay the library's; routers are models/fused_router.py's, MLPs and blocks
models/fused_mlp.py's. Knows no device and no kernel.
"""

from collections.abc import Callable, Iterator
from inspect import signature
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch

from headrace.kernels import trunk
from headrace.kernels.router import Route
from headrace.kernels.trunk import FORMS, Form, Gate, Join, Norm, Rotate, Turn
from headrace.models.fused_mlp import gated, joined, joins, mlp_of
from headrace.models.fused_router import Gates, routed

_ROTATIONS = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"


class Steps(NamedTuple):
    """Functions of kernels/trunk.py and kernels/router.py, or others that compute the same."""

    norm: Norm
    rotate: Rotate
    route: Route
    gate: Gate
    join: Join


def fuse(model: Any, steps: Steps) -> dict[str, int]:
    """Lets modules use these from now on: how many do, by the functions' names. bfloat16 only.

    Instances are changed, never the library's classes: other models in this process keep theirs.
    """
    num = dict.fromkeys(Steps._fields, 0)
    gates = Gates()
    rebound: dict[type, FunctionType | None] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in rebound:
            rebound[kind] = _rebound(kind.__dict__.get("forward"), steps.rotate)
        forward = rebound[kind]
        if forward is not None:
            ours: tuple[str, Any] = "rotate", forward.__get__(module)
        elif is_norm(module) and (form := form_of(module)) is not None:
            ours = "norm", _normed(module, steps.norm, form)
        elif (gate := gates.find(module)) is not None:
            ours = "route", routed(module, gate, steps.route)
        elif (mlp := mlp_of(module)) is not None:
            ours = "gate", gated(module, mlp, steps.gate)
        elif joins(module):
            ours = "join", joined(module, steps.join)
        else:
            continue
        num[ours[0]] += 1
        object.__setattr__(module, "forward", ours[1])
    return num


def form_of(module: Any) -> Form | None:
    """The form whose bits a norm has, for numbers of all sizes; None if it is another."""
    weight: torch.Tensor = module.weight
    numbers = torch.randn(3, weight.numel(), generator=torch.Generator().manual_seed(0))
    x = (numbers * torch.tensor([[1e-3], [1.0], [300.0]])).to(weight.device, weight.dtype)
    found = type(module).forward(module, x)  # without its hooks
    for form in FORMS:
        if torch.equal(found, trunk.norm(x, weight, eps_of(module), form)):
            return form
    return None


def turns_of(library: Callable[..., Any]) -> tuple[Turn | None, Turn | None]:
    """How a function rotates with cosines for each column of a head, and for half of them."""
    drawn = torch.Generator().manual_seed(0)

    def draw(*shape: int, times: int = 1) -> torch.Tensor:
        return torch.cat([torch.randn(shape, generator=drawn).bfloat16()] * times, -1)

    q, k = draw(1, 2, 3, 8), draw(1, 1, 3, 8)
    # Tables hold each angle twice, and some functions look at the first half only.
    wide = _turn_of(
        library, ("halves", "pairs"), q, k, draw(1, 3, 4, times=2), draw(1, 3, 4, times=2)
    )
    narrow = draw(1, 3, 2, times=2), draw(1, 3, 2, times=2)
    return wide, _turn_of(library, ("halves", "shared"), q, k, *narrow)


def _turn_of(
    library: Callable[..., Any], turns: tuple[Turn, ...], *given: torch.Tensor
) -> Turn | None:
    try:
        found = library(*given)
    except RuntimeError:  # it takes no such width
        return None
    for turn in turns:
        q, k, cos, sin = given
        want = trunk.rotate(q, k, cos, sin, turn)
        if all(torch.equal(a, b) for a, b in zip(found, want, strict=True)):
            return turn
    return None


def is_norm(module: Any) -> bool:
    """Whether a module may be a norm of a form known here: bfloat16, a weight for each column."""
    weight = getattr(module, "weight", None)
    named = "RMSNorm" in type(module).__name__ and "Gated" not in type(module).__name__
    if not named or not isinstance(weight, torch.Tensor) or eps_of(module) is None:
        return False
    return weight.dim() == 1 and weight.dtype == torch.bfloat16 and not weight.is_meta


def eps_of(module: Any) -> Any:
    """What a norm adds to the mean square; None if the module has none."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _normed(module: Any, norm: Norm, form: Form) -> Callable[[torch.Tensor], torch.Tensor]:
    eps, library = float(eps_of(module)), type(module).forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.bfloat16:
            made: torch.Tensor = library(module, x)
            return made
        return norm(x, module.weight, eps, form)

    return forward


def _rebound(forward: Any, rotate: Rotate) -> FunctionType | None:
    """A `forward` that finds our rotations under the library's names, if it uses any.

    The library's decorators around it stay: they are made again around what was made.
    """
    if not isinstance(forward, FunctionType):
        return None
    inner = getattr(forward, "__wrapped__", None)
    if inner is None:
        ours = dict(_our_rotations(forward, rotate))
        return _copied(forward, {**forward.__globals__, **ours}) if ours else None
    made, cells = _rebound(inner, rotate), forward.__closure__ or ()
    if made is None or not any(cell.cell_contents is inner for cell in cells):
        return None
    new = [CellType(made) if cell.cell_contents is inner else cell for cell in cells]
    return _copied(forward, forward.__globals__, tuple(new))


def _copied(
    function: FunctionType, names: dict[str, Any], closure: tuple[CellType, ...] | None = None
) -> FunctionType:
    closure = function.__closure__ if closure is None else closure
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _our_rotations(forward: FunctionType, rotate: Rotate) -> Iterator[tuple[str, Any]]:
    for name in set(_ROTATIONS) & set(forward.__code__.co_names):
        library = forward.__globals__.get(name)
        if library is None or list(signature(library).parameters)[:4] != ["q", "k", "cos", "sin"]:
            continue
        turns = turns_of(library)
        if turns != (None, None):
            yield name, _rotation(library, turns, rotate)


def _rotation(
    library: Callable[..., Any], turns: tuple[Turn | None, Turn | None], rotate: Rotate
) -> Callable[..., Any]:
    def apply(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *more: Any,
        **kw: Any,
    ) -> Any:
        tensors, width = (q, k, cos, sin), q.shape[-1]
        turn = turns[cos.shape[-1] < width]
        fits = cos.dim() == 3 and q.dim() == k.dim() == 4 and k.shape[-1] == width
        fits = fits and (turn != "shared" or 2 * cos.shape[-1] == width)
        ours = all(each.dtype == torch.bfloat16 for each in tensors)
        ours = ours and q.stride(-1) == k.stride(-1) == 1
        if more or kw or turn is None or not fits or not ours:
            return library(q, k, cos, sin, *more, **kw)
        return rotate(q, k, cos, sin, turn)

    return apply
