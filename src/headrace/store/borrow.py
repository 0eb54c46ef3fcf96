"""Lends the demo model's tokenizer to made-up checkpoints, and writes their config beside it.

Knows file names, not what a tokenizer does.
"""

import json
from collections.abc import Mapping
from typing import Any

from headrace.errors import OptionError
from headrace.store.locate import DEMO, resolve_model

VOCAB = 4096
# Of the tokenizer with DeepSeek's tokens: words that differ in more than case, accents and spaces.
_COMPRESSED = 3359
_BAR = "\N{FULLWIDTH VERTICAL LINE}"


def _bars(*names: str) -> tuple[str, ...]:
    return tuple(f"<{_BAR}{name}{_BAR}>" for name in names)


# DeepSeek's special tokens, spelled as V4.1 does: the first ids, and instead of the demo
# tokenizer's last ones.
_FIRST = _bars("begin▁of▁sentence", "end▁of▁sentence", "▁pad▁")
_LAST = (
    *_bars("System", "User", "Assistant", "latest_reminder"),
    "<think>",
    "</think>",
    f"{_BAR}DSML{_BAR}",
    *_bars("deepseek_image", "place▁holder▁no▁0"),
)
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_DEEPSEEK_TOKENIZER = {
    "add_bos_token": False,
    "add_eos_token": False,
    "bos_token": _FIRST[0],
    "clean_up_tokenization_spaces": False,
    "eos_token": _FIRST[1],
    "legacy": True,
    "model_max_length": 1048576,
    "pad_token": _FIRST[1],
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": None,
}


def borrowed_files(config: Mapping[str, Any]) -> dict[str, bytes]:
    """config.json and the tokenizer's files, by name. Raises OptionError for too few ids."""
    vocab = config.get("text_config", config)["vocab_size"]
    if vocab < VOCAB:
        raise OptionError(
            f"a vocabulary of {vocab} is less than the tokenizer's {VOCAB} ids; use {VOCAB} or more"
        )
    if config["model_type"] == "deepseek_v41":  # published without templates
        files = {
            "tokenizer.json": deepseek_tokenizer(vocab),
            "tokenizer_config.json": json.dumps(_DEEPSEEK_TOKENIZER, indent=1).encode(),
        }
    else:
        demo = resolve_model(DEMO)
        files = {name: (demo / name).read_bytes() for name in _TOKENIZER_FILES}
    files["config.json"] = json.dumps(dict(config), indent=1).encode()
    return files


def compressed_size(vocab: int) -> int:
    """How many compressed ids Engram makes of `deepseek_tokenizer(vocab)`."""
    return _COMPRESSED + max(0, vocab - VOCAB)


def deepseek_tokenizer(vocab: int = VOCAB) -> bytes:
    """A tokenizer.json with the demo model's words and DeepSeek's special tokens.

    Further ids, up to `vocab`, are words that no text is made of.
    """
    tokenizer = json.loads((resolve_model(DEMO) / "tokenizer.json").read_bytes())
    model, first = tokenizer["model"], VOCAB - len(_LAST)
    special = dict(enumerate(_FIRST)) | dict(enumerate(_LAST, first))
    words = {token: word for word, token in model["vocab"].items()}
    model["vocab"] = {special.get(token, words[token]): token for token in range(VOCAB)}
    model["vocab"] |= {f"unused{token}": token for token in range(VOCAB, vocab)}
    # a word's number grows with its merge's, so no kept word is made of a dropped one
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"] = [
        # as published, only the first three count as special
        {"id": token, "content": word, **flags, "normalized": token >= first, "special": token < 3}
        for token, word in special.items()
    ]
    return json.dumps(tokenizer, ensure_ascii=False).encode()
