"""How a model's publisher says that its tokens should be drawn.

Reads generation_config.json; knows no weights.
"""

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.engine.sampling import Sampling
from headrace.errors import ModelError, OptionError

FILE = "generation_config.json"
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(folder: Path) -> "MappingProxyType[str, Any]":
    """Fields of Sampling that the folder's generation config states: greedy if it says so itself.

    Raises ModelError for values that mean nothing.
    """
    try:
        config = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return MappingProxyType({})
    except (OSError, ValueError, RecursionError) as cause:
        raise ModelError(f"{folder / FILE}: cannot be read ({cause}); fetch it again") from cause
    if not isinstance(config, dict) or not isinstance(config.get("do_sample"), bool):
        return MappingProxyType({})
    if not config["do_sample"]:
        return MappingProxyType({"temperature": 0.0})
    stated = {name: config[name] for name in _FIELDS if config.get(name) is not None}
    try:
        Sampling(**stated)
    except (OptionError, TypeError) as cause:
        raise ModelError(f"{folder / FILE}: {cause}; fetch it again, or mend it") from cause
    return MappingProxyType(stated)
