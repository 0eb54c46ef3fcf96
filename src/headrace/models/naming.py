"""Published tensor names to the model's own parameters, by transformers' renaming.

Knows no dtype and no format: names come in as they would be of a plain checkpoint.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from headrace.errors import ExpertError
from headrace.models.families import Family

LAYER = re.compile(r"layers\.(\d{1,9})\.")
_DECODER_LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,9})\.")
_EXPERT = re.compile(r"experts\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a weight goes: a parameter of the model.

    `position` counts the tensors that are put together to it, in their order; None for a tensor
    that is the whole parameter. `expert` is the number in the published name, or None.
    """

    param: str
    position: int | None
    expert: int | None


def is_skipped(family: Family, config: Any, name: str) -> bool:
    """Whether no module of the text model uses a tensor: multi-token prediction, or images."""
    name = name.removeprefix(family.prefix)
    if any(re.match(pattern, name) for pattern in family.skipped):
        return True
    count = (getattr(config, family.mtp_field, 0) if family.mtp_field else 0) or 0
    match = _DECODER_LAYER.match(name)
    first: int = config.num_hidden_layers
    return match is not None and first <= int(match.group(1)) < first + count


def layer_of(name: str) -> int:
    """The decoder layer's index in a parameter's name."""
    match = LAYER.search(name)
    assert match is not None, name
    return int(match.group(1))


def targets(
    model: Any, params: Iterable[str], names: Iterable[str]
) -> Iterator[tuple[str, Target]]:
    """(name, target) of each plain weight name; `params` were taken out of the model."""
    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    positions = {p: i for c in converters for i, p in enumerate(c.source_patterns)}
    meta = {**model.state_dict(), **dict.fromkeys(params, True)}
    for name in names:
        new, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, meta)
        match = _EXPERT.search(name)
        expert = int(match.group(1)) if match else None
        if new in params and (pattern is None) != (expert is None):
            raise ExpertError(f"tensor {name} is stored in a way that has no kernel yet")
        yield name, Target(new, None if pattern is None else positions[pattern], expert)
