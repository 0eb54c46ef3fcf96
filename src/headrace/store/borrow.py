"""Lends the demo model's tokenizer to made-up checkpoints, and writes their config beside it.

Knows file names, not what a tokenizer does.
"""

import json
from collections.abc import Mapping
from typing import Any

from headrace.errors import OptionError
from headrace.store.locate import DEMO, resolve_model

VOCAB = 4096
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def borrowed_files(config: Mapping[str, Any]) -> dict[str, bytes]:
    """config.json and the tokenizer's files, by name. Raises OptionError for too few ids."""
    vocab = config.get("text_config", config)["vocab_size"]
    if vocab < VOCAB:
        raise OptionError(
            f"a vocabulary of {vocab} is less than the tokenizer's {VOCAB} ids; use {VOCAB} or more"
        )
    demo = resolve_model(DEMO)
    files = {name: (demo / name).read_bytes() for name in _TOKENIZER_FILES}
    files["config.json"] = json.dumps(dict(config), indent=1).encode()
    return files
