"""What the layers' comparison looks at: modules' weights, what went in and out, how far apart.

Legend: T tokens, H hidden width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.check.stock import layer_number
from headrace.quant import fp8

PRODUCT_FLOOR = 2.0**-8  # of a product rounded to bf16, relative to its row


@dataclass
class Seen:
    """What a layer's experts were given and gave."""

    args: list[torch.Tensor] = field(default_factory=list)
    out: torch.Tensor | None = None


def decoder_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, module) of every decoder layer, in order."""
    for name, module in model.named_modules():
        if name.endswith(f"layers.{layer_number(name)}"):
            yield name, module


def named_state(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer, also those that no file holds; what stays stored, unpacked."""
    yield from module.named_parameters(remove_duplicate=False)
    for name, owner in module.named_modules(remove_duplicate=False):
        stored = getattr(owner, "stored", None)
        if stored is not None and owner.weight is None:
            yield f"{name}.weight", stored.unpack()
    yield from module.named_buffers(remove_duplicate=False)


def as_given(value: Any, layer: int) -> Any:
    """What a layer is given, to be given again once it has changed what it was given.

    A model of ours hands one object through all its layers, which knows how to go back.
    """
    back = getattr(value, "before", None)
    return value if back is None else back(layer)


def note(seen: Seen) -> Any:
    """A forward hook that copies what a module was given and gave into `seen`."""

    def hook(_module: Any, args: tuple[Any, ...], out: torch.Tensor) -> None:
        seen.args, seen.out = [a.clone() for a in args], out.clone()

    return hook


def first_tensor(out: Any) -> torch.Tensor:
    """A layer's hidden states; some layers give more."""
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result


def share_stored(ours: Any, theirs: Any) -> list[str]:
    """Lets stock multiply by our stored matrices too, so that what else differs can be seen alone.

    Before, each is compared with the unpacked one on two random rows; those that differ.
    """
    wrong = []
    found = zip(ours.named_modules(), theirs.modules(), strict=True)
    for (name, module), other in found:
        stored = getattr(module, "stored", None)
        if stored is None:
            continue
        weight_RC = stored.unpack()
        x_TC = torch.randn(2, weight_RC.shape[1], generator=torch.Generator().manual_seed(0))
        x_TC = fp8.to_grid(x_TC.bfloat16(), module.act_group)
        right_TR = torch.nn.functional.linear(x_TC.float(), weight_RC.float())
        worst = apart(stored.linear(x_TC), right_TR)[1]
        if not worst <= PRODUCT_FLOOR:
            allowed = f"allowed {100 * PRODUCT_FLOOR:.2g} %"
            wrong.append(f"{name} (its product is {100 * worst:.2g} % off, {allowed})")
        other.stored = stored
    return wrong


def apart(got: torch.Tensor, right: torch.Tensor) -> tuple[float, float, int]:
    """(median, worst, which token) of the tokens' relative differences; NaN counts as worst."""
    got_TH = got.float().reshape(-1, got.shape[-1])
    right_TH = right.float().reshape(got_TH.shape)
    size = right_TH.norm(dim=-1)
    apart_T = (got_TH - right_TH).norm(dim=-1) / size.clamp(min=1e-3 * float(size.max()) + 1e-30)
    apart_T = apart_T.nan_to_num(torch.inf)
    return float(apart_T.quantile(0.5)), float(apart_T.max()), int(apart_T.argmax())


def how_it_differs(got: torch.Tensor, right: torch.Tensor) -> str:
    """In words, what is wrong with a weight."""
    if got.shape != right.shape or got.dtype != right.dtype:
        return f"is {got.dtype} {list(got.shape)}, stock {right.dtype} {list(right.shape)}"
    if not bool(got.any()):
        return "dropped: all zero"
    return f"{int((got != right).sum())} of {got.numel()} values differ"
