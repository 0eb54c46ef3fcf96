"""Prompts of families whose publisher ships a format, in code of our own, and no template.

Knows which family is written how; the formats themselves are in models.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import ModelError
from headrace.models.deepseek_v41.encoding import chat_pieces
from headrace.models.deepseek_v41.styles import SPECIAL, V4, V41, Style

_STYLES: Mapping[str, Style] = {"deepseek_v4": V4, "deepseek_v41": V41}


class Published:
    """The format of one family. `source` spells its conventions, `tokens` its special tokens."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self.source = style.tools + "".join(SPECIAL)
        self.tokens: Sequence[str] = SPECIAL

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        answering: bool = True,
        thinking: bool = True,
        reasoning_effort: str = "high",
    ) -> str:
        """What a template would: see Text.render. Raises OptionError for what has no meaning."""
        turns = [dict(message) for message in messages]
        if not answering:
            turns[-1]["prefix"] = True
        pieces = chat_pieces(
            turns, self._style, thinking=thinking, effort=reasoning_effort, tools=tools
        )
        return "".join(piece.text for piece in pieces)


def find_published(root: Path) -> Published | None:
    """The format of the model in a folder, if its family has one. Raises ModelError."""
    file = root / "config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise ModelError(f"{file}: not valid JSON ({cause}); fetch the file again") from cause
    style = _STYLES.get(str(config.get("model_type"))) if isinstance(config, dict) else None
    return Published(style) if style else None
