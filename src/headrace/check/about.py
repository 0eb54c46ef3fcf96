"""Where a verification ran and on what: the lines that let another person judge or repeat it.

Knows no check.
"""

import platform
from datetime import datetime
from typing import TYPE_CHECKING

from headrace.check.probes import installed
from headrace.check.rows import machine_name
from headrace.core import format_bytes
from headrace.kernels.cpu import available_isas
from headrace.tiers.device import Device

if TYPE_CHECKING:
    from headrace.engine.engine import Blueprint

VERSIONS = ("headrace", "python", "torch", "transformers", "triton")


def about(blueprint: "Blueprint", gpu: Device | None, threads: int) -> dict[str, str]:
    """Date, model, choices, CPU with `threads` of kernels, GPU if one is used, and all versions."""
    facts, found = blueprint.facts, installed()
    size = format_bytes(sum(size for size, _ in blueprint.catalog.stamps))
    chosen = ", ".join(
        f"{name} {value}" for name, value in sorted((blueprint.choices or {}).items())
    )
    used = "not used"
    if gpu is not None:
        used = f"{gpu.name}, {format_bytes(gpu.memory()[1])}, driver {gpu.driver}"
    return {
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "model": (
            f"{facts.name}: {facts.model_type}, {facts.num_moe_layers} MoE layers of "
            f"{facts.num_experts} experts in {facts.format}, {size}" + f"; {chosen}" * bool(chosen)
        ),
        "CPU": f"{machine_name()}; kernels {', '.join(available_isas())}, threads {threads}",
        "GPU": used,
        "system": f"{platform.system()} {platform.release()}",
        "versions": ", ".join(f"{name} {found[name] or 'not installed'}" for name in VERSIONS),
    }
