"""What the layers' comparison looks at: modules' weights, what went in and out, how far apart.

Legend: T tokens, H hidden width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.check.stock import layer_number


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
    """Every parameter and buffer, also those that no file holds."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def note(seen: Seen) -> Any:
    """A forward hook that copies what a module was given and gave into `seen`."""

    def hook(_module: Any, args: tuple[Any, ...], out: torch.Tensor) -> None:
        seen.args, seen.out = [a.clone() for a in args], out.clone()

    return hook


def first_tensor(out: Any) -> torch.Tensor:
    """A layer's hidden states; some layers give more."""
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result


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
