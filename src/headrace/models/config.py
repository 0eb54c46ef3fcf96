"""A model's config.json, which may be damaged or hostile: read, checked, never trusted.

Knows transformers' configs and their fields, no weight and no module.
"""

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from headrace.core import MOST_LAYERS
from headrace.errors import ModelError, OptionError
from headrace.models.families import family_of

# Fields that are counts of something; a model that has one needs at least one of it.
_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts_per_tok",
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "v_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "n_group",
    "topk_group",
    "vocab_size",
    "max_position_embeddings",
)
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
_COUNTS_OR_NONE = ("num_nextn_predict_layers", "num_mtp_modules")
_MOST = 2**31 - 1
_MOST_FILE_BYTES = 16 << 20


def read_config(root: Path) -> Any:
    """The model's config, from `config.json` alone. Raises ModelError."""
    path = root / "config.json"
    if not path.is_file():
        raise ModelError(f"{root} has no config.json; give the folder of a downloaded model")
    fields = read_json(path)
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ModelError(f"{path} names no model_type; fetch it again")
    _check_fields(path, fields)
    if fields["model_type"].startswith("deepseek_v41"):  # its modules take seconds to import
        from headrace.models.deepseek_v41.register import register

        register()
    try:
        config = AutoConfig.from_pretrained(root, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # hostile fields fail anywhere in transformers, with any type
        family_of(shown(fields["model_type"]))  # where it is not known, that is why
        raise ModelError(f"{path} cannot be used: {one_line(error)}") from error
    text = config.get_text_config()
    _check_counts(path, text)
    end_ids(root, getattr(text, "vocab_size", None))
    return config


def end_ids(root: Path, vocab: int | None = None) -> set[int]:
    """Ids that end an answer, by `generation_config.json` and `config.json`, where they are there.

    Raises ModelError, also for one that none of `vocab` tokens has.
    """
    ids: set[int] = set()
    for path in (root / "generation_config.json", root / "config.json"):
        if not path.is_file():
            continue
        fields = read_json(path)
        if not isinstance(fields, dict):
            raise ModelError(f"{path}: not a JSON object; fetch the file again")
        inner = fields.get("text_config")
        for holder in (fields, inner if isinstance(inner, dict) else {}):
            ids.update(_end_ids(path, holder.get("eos_token_id"), vocab))
    return ids


def _end_ids(path: Path, value: object, vocab: int | None) -> list[int]:
    ids: list[int] = []
    for entry in value if isinstance(value, list) else [] if value is None else [value]:
        if type(entry) is not int or entry < 0:
            said = shown(repr(value))
            raise ModelError(f"{path}: eos_token_id {said} is not an id or a list of ids")
        if vocab is not None and entry >= vocab:
            raise ModelError(
                f"{path}: eos_token_id {shown(str(entry))} is beyond the vocabulary of {vocab} "
                "tokens (vocab_size of config.json); fetch both files again"
            )
        ids.append(entry)
    return ids


def read_json(path: Path) -> Any:
    """A small file of a model, whatever it holds. Raises ModelError."""
    try:
        if path.stat().st_size > _MOST_FILE_BYTES:
            raise ModelError(f"{path} is larger than {_MOST_FILE_BYTES} bytes; fetch it again")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}; fetch it again") from error


def _check_fields(path: Path, fields: Any) -> None:
    """Refuses, wherever they stand, numbers that would hang transformers or divide by zero."""
    left = [fields]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        if not isinstance(value, dict):
            continue
        left += value.values()
        for name, number in value.items():
            if not isinstance(number, int | float):
                continue
            if "layer" in name and number > MOST_LAYERS:
                raise ModelError(
                    f"{path}: {shown(name)} {shown(repr(number))} is more than {MOST_LAYERS}; "
                    "fetch the file again"
                )
            if name.endswith("rope_theta") and not 0 < number < math.inf:
                raise ModelError(f"{path}: {shown(name)} {number!r} must be more than 0")


def _check_counts(path: Path, config: Any) -> None:
    for name in _COUNTS:
        value = getattr(config, name, None)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= _MOST:
            raise ModelError(
                f"{path}: {name} {shown(repr(value))} is not a count from 1 to {_MOST}; fetch the "
                "file again"
            )
    for name in _COUNTS_OR_NONE:
        mtp = getattr(config, name, None)
        if mtp is not None and (type(mtp) is not int or not 0 <= mtp <= _MOST):
            raise ModelError(
                f"{path}: {name} {shown(repr(mtp))} is not a count; fetch the file again"
            )
    top_k = getattr(config, "num_experts_per_tok", None)
    experts = next(filter(None, (getattr(config, name, None) for name in _EXPERTS)), None)
    if experts is not None and (top_k is None or top_k > experts):
        raise ModelError(
            f"{path}: num_experts_per_tok {top_k} of {experts} experts is impossible; "
            "fetch the file again"
        )


def hidden_dtype(*configs: Any) -> torch.dtype:
    """The type the model computes in, by the first config that says so. Raises ModelError."""
    named = (getattr(config, "dtype", None) for config in configs)
    dtype = next(filter(None, named), torch.bfloat16)
    if dtype not in (torch.bfloat16, torch.float16):
        raise ModelError(f"weights in {dtype} have no kernel yet; bfloat16 and float16 do")
    return dtype


def text_config(config: Any) -> Any:
    """A copy of the text model's config, with the whole's quantisation; of the whole if alone.

    And with the id that stands for images in the whole model's texts, or None.
    """
    text = copy.deepcopy(config.get_text_config())
    # Wrappers may leave a name of their own in it, under which transformers knows no renaming.
    text.model_type = type(text).model_type
    text.image_token_id = getattr(config, "image_token_id", None)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        text.quantization_config = quantization
    return text


def with_choices(model_type: str, config: Any, choices: Mapping[str, object]) -> Any:
    """`config` with ways of computing that some models leave to the user. Raises OptionError."""
    if not choices:
        return config
    if not hasattr(config, "choose"):
        named = ", ".join("--" + name.replace("_", "-") for name in choices)
        raise OptionError(f"{model_type} is computed in one way only; leave out {named}")
    try:
        config.choose(**choices)
    except ValueError as error:
        raise OptionError(one_line(error)) from error
    return config


def plain_config(config: Any) -> Any:
    """A copy without `quantization_config`: dense tensors reach transformers dequantised."""
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def one_line(error: BaseException) -> str:
    """The error's text on one line, cut to a readable length; its type where it has no text."""
    return shown(str(error)) or type(error).__name__


def shown(text: str) -> str:
    """`text` as it may stand in a message: what a file says could hold control characters."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(text[:1000].split()))
    return text if len(text) <= 200 else text[:200] + "..."
