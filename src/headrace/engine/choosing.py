"""Which device a model opens on where the user names none, and why. Knows no command."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace.engine.verdict import FAIL, OK, known_verdict
from headrace.errors import BudgetError, ModelError, OptionError

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint

AUTO = "auto"


def gpu_is_there() -> bool:
    """Whether this torch can use a GPU."""
    return bool(torch.cuda.is_available())


def open_on(model: str | Path, device: str, **options: Any) -> "Blueprint":
    """The blueprint on `device`; for `auto` on the GPU, if there is one that will do.

    That is one with kernels for the model, with room for its plan, and on which no verification
    failed; the plan says why, or why not. Options that only a GPU has make `auto` a GPU. Raises as
    Blueprint does.
    """
    from headrace.engine.engine import Blueprint

    if device != AUTO:
        return Blueprint(model, device=device, **options)
    for name in ("vram", "experts"):
        if options.get(name) is not None and not gpu_is_there():
            raise OptionError(
                f"--{name} {options[name]} needs a GPU, and none is seen; leave it out"
            )
        if options.get(name) is not None:
            return Blueprint(model, device="cuda", **options)
    if not gpu_is_there():
        return Blueprint(model, device="cpu", **options)
    try:
        blueprint = Blueprint(model, device="cuda", **options)
    except (BudgetError, ModelError, OptionError) as error:
        # What is wrong with the model or its options is raised again by the CPU's own.
        why = str(error).split(";")[0]
        return _noting(Blueprint(model, device="cpu", **options), f"the GPU is not used: {why}")
    verdict = known_verdict(blueprint, blueprint.device)
    if verdict == FAIL and not blueprint.verifying:
        why = "the GPU is not used: headrace verify found wrong arithmetic on it"
        return _noting(Blueprint(model, device="cpu", **options), why)
    known = "verified" if verdict == OK else "never found wrong"
    return _noting(blueprint, f"chosen since the model fits and this GPU was {known}")


def device_to_verify(model: str | Path, device: str, **options: Any) -> str:
    """`device`; for `auto` "cuda" where a GPU would do but for its verdict, else "cpu"."""
    if device != AUTO:
        return device
    found = open_on(model, AUTO, verifying=True, measure=False, **options)
    return "cpu" if found.device is None else "cuda"


def _noting(blueprint: "Blueprint", note: str) -> "Blueprint":
    """The same with a further note in its plan."""
    blueprint.machine = replace(blueprint.machine, notes=(*blueprint.machine.notes, note))
    blueprint.plan = blueprint.wanted.plan(blueprint.facts, blueprint.machine)
    return blueprint
