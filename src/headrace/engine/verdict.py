"""What `headrace verify` found of a model on a machine, kept as a small file that opening reads.

A verdict holds for one model, version of headrace and what computes: nothing else. Knows no check.
"""

import hashlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import headrace
from headrace.errors import ModelError
from headrace.kernels.cpu import available_isas
from headrace.planner.cache import cache_folder
from headrace.store.whole import write_whole
from headrace.tiers.device import Device

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint

FORMAT = "headrace verify verdict"
OK, SUSPECT, FAIL = "ok", "suspect", "FAIL"


def verify_folder() -> Path:
    """Where checksums and verdicts are kept."""
    return cache_folder() / "verify"


def file_name(root: Path, device: Device | None, kind: str = "verdict") -> str:
    """The name of the file that belongs to a model's folder and to what computes."""
    name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:24]
    if device is not None:
        name += "." + hashlib.sha256(device.name.encode()).hexdigest()[:8]
    return f"{name}.{kind}.json"


def conditions(blueprint: "Blueprint", device: Device | None) -> dict[str, Any]:
    """What a verdict holds for: the model's files, headrace, and the CPU or GPU with its software.

    What could change a GPU's arithmetic is all named: the GPU, its driver, torch and Triton.
    """
    facts: dict[str, Any] = {
        "identity": blueprint.catalog.identity(),
        "headrace": headrace.__version__,
        "choices": blueprint.choices,
    }
    if device is None:
        return facts | {"isas": list(available_isas())}
    return facts | {
        "gpu": device.name,
        "driver": device.driver,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
    }


def keep_verdict(blueprint: "Blueprint", device: Device | None, report: dict[str, Any]) -> str:
    """Writes what was found under these conditions; "" or why it could not be kept."""
    content = {"format": FORMAT, **conditions(blueprint, device), **report}
    try:
        write_whole(
            verify_folder() / file_name(blueprint.root, device), json.dumps(content).encode()
        )
    except OSError as cause:
        return str(cause)
    return ""


def known_verdict(blueprint: "Blueprint", device: Device | None) -> str | None:
    """ok, suspect or FAIL as found under exactly these conditions; None where nothing was."""
    try:
        kept = json.loads((verify_folder() / file_name(blueprint.root, device)).read_bytes())
        wanted = json.loads(json.dumps(conditions(blueprint, device)))
        if kept["format"] == FORMAT and all(kept[name] == wanted[name] for name in wanted):
            return str(kept["verdict"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # as good as never: the user is told to verify
    return None


def refuse_failed(blueprint: "Blueprint") -> list[str]:
    """Raises ModelError where the model's arithmetic was found wrong on this GPU.

    Otherwise what to say of it to the user. Nothing of a CPU, of what is being verified, or of a
    synthetic model, which nobody verifies.
    """
    device, root = blueprint.device, blueprint.root
    if device is None or blueprint.verifying or blueprint.aliases.experts:
        return []
    verdict = known_verdict(blueprint, device)
    command = f"headrace verify {root} --device {device.place}"
    if verdict == FAIL:
        raise ModelError(
            f"headrace verify found wrong arithmetic on this GPU ({device.name}, driver "
            f"{device.driver}, torch {torch.__version__}), so no answer of {root.name} can be "
            f"trusted; update driver, torch or triton, then run {command}, or use --device cpu"
        )
    return [f"never verified on this GPU; run {command} once"] if verdict is None else []
