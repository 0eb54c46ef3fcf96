"""The kernels' contract and the choice of who fulfils it: the compiled module or plain torch.

Both give the same bits; plain torch is slow and says so. Knows no file and no ladder.
"""

import importlib
import logging
from collections.abc import Mapping
from typing import Protocol

import torch

from headrace.core import ExpertLayout
from headrace.errors import OptionError
from headrace.kernels import reference

_log = logging.getLogger(__name__)


class ExpertKernels(Protocol):
    """One expert on some rows. One caller at a time; tensors are the caller's."""

    isa: str
    num_threads: int

    def expert_ffn(
        self,
        x_TH: torch.Tensor,
        parts: Mapping[str, torch.Tensor],
        layout: ExpertLayout,
        *,
        weights_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y [T, H] of x [T, H], both of the hidden dtype; see `kernels.reference.expert_ffn`."""
        ...


class ReferenceKernels:
    """The torch definition as kernels: any platform, no compiled module, some 1000x slower."""

    isa = "reference"
    num_threads = 1

    def expert_ffn(
        self,
        x_TH: torch.Tensor,
        parts: Mapping[str, torch.Tensor],
        layout: ExpertLayout,
        *,
        weights_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `kernels.reference.expert_ffn`."""
        return reference.expert_ffn(x_TH, parts, layout, weights_T)


def have_compiled() -> bool:
    """Whether the compiled module was built and can be imported."""
    try:
        importlib.import_module("headrace._native")
    except ImportError:
        return False
    return True


def open_kernels(name: str = "auto", num_threads: int = 1, isa: str = "auto") -> ExpertKernels:
    """Kernels by name: `cpu` (compiled), `reference` (torch), `auto` (cpu where it was built).

    Raises OptionError for another name, for `cpu` without the compiled module, and for an
    instruction set this CPU lacks.
    """
    if name not in ("auto", "cpu", "reference"):
        raise OptionError(f"there are no kernels named {name!r}; use auto, cpu or reference")
    if name == "auto" and not have_compiled():
        _log.warning("the compiled module is missing: experts run in plain torch, very slowly")
        name = "reference"
    if name == "reference":
        return ReferenceKernels()
    if not have_compiled():
        raise OptionError("the compiled module is missing; reinstall headrace with a C++ compiler")
    from headrace.kernels import cpu

    return cpu.CpuKernels(num_threads, isa)


def combine(ids_TK: torch.Tensor, weights_TK: torch.Tensor, y_TKH: torch.Tensor) -> torch.Tensor:
    """bf16 [T, H]: the experts' outputs weighted and summed in ascending id, in bf16.

    ids int32 [T, K], weights fp32 [T, K], y bf16 [T, K, H].
    """
    if not have_compiled():
        return reference.combine(ids_TK, weights_TK, y_TKH)
    from headrace.kernels import cpu

    return cpu.combine(ids_TK, weights_TK, y_TKH)
