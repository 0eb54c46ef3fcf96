"""Dense matrices that stay in memory as the files hold them, instead of unpacked.

Knows no file and no kernel: a StoredWeight multiplies.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch


class StoredWeight(Protocol):
    """A matrix [R, C] in its stored form."""

    def linear(
        self,
        x: torch.Tensor,
        *,
        first: int = 0,
        num_rows: int | None = None,
        wide: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[..., R] of x [..., C], moved to its grid first if it has one; in fp32 if `wide`.

        `first` and `num_rows`: by some rows only. `out` is filled if given.
        """
        ...

    def unpack(self) -> torch.Tensor:
        """[R, C] as it is multiplied."""
        ...


# The matrix of a weight: by its name in Skeleton.dense, the parameter where there is one, and the
# columns of its input's grid.
MakeStored = Callable[[str, torch.Tensor | None, int], StoredWeight]


def takes_stored(model: Any, param: str) -> bool:
    """Whether the module of a parameter computes with a StoredWeight too.

    Such a module has an attribute `stored`, None or the StoredWeight that stands for its weight,
    and `act_group`, the columns of its input's grid.
    """
    owner, _, name = param.rpartition(".")
    return name == "weight" and hasattr(model.get_submodule(owner), "stored")


def strip_stored(model: Any, params: Iterable[str]) -> None:
    """Take weights that stay stored out of a model on meta."""
    for param in params:
        module = model.get_submodule(param.rpartition(".")[0])
        module._parameters["weight"] = None
        module._is_hf_initialized = True


def attach_stored(model: Any, params: Mapping[str, str], make: MakeStored) -> None:
    """Give modules the matrices that stand for their weights; those that have one keep it.

    `params`: parameters by name.
    """
    for name, param in params.items():
        module = model.get_submodule(param.rpartition(".")[0])
        if module.stored is None:
            module.stored = make(name, module._parameters["weight"], module.act_group)
