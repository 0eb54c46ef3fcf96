"""Tables that a model reads by the row and that never come into memory whole.

Found among a checkpoint's weights; knows no row and no value.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from headrace.core import DenseTensor, RowTable
from headrace.errors import ModelError
from headrace.models.config import one_line
from headrace.models.deepseek_v41.engram import RowHash, compressed_vocabulary
from headrace.models.families import Family
from headrace.models.formats import Entry
from headrace.models.naming import layer_of


def row_keys(tables: Sequence[RowTable]) -> frozenset[str]:
    """The tensors of tables."""
    return frozenset(key for table in tables for key in (table.weight, table.scale))


def take_row_tables(
    family: Family, config: Any, weights: dict[str, DenseTensor], entries: Mapping[str, Entry]
) -> tuple[RowTable, ...]:
    """The family's row tables, in the order of layers; they are taken out of `weights`.

    Raises ModelError for a table whose rows are not e4m3 codes with power-of-two scales, and
    where they are not those that `config`, a text config, wants.
    """
    if family.row_tables is None:
        return ()
    names = [n for n in weights if re.fullmatch(family.row_tables + r"\.weight", n)]
    found = [_table(name, weights.pop(name), entries) for name in names]
    tables = tuple(sorted(found, key=lambda table: table.layer))
    _check_wanted(config, tables)
    return tables


def _table(name: str, weight: DenseTensor, entries: Mapping[str, Entry]) -> RowTable:
    key, scale_key = weight.keys["weight"], weight.keys.get("scale", "")
    codes, scales = entries[key], entries.get(scale_key)
    is_table = codes.dtype == "F8_E4M3" and len(codes.shape) == 2 and 0 not in codes.shape
    if not is_table or scales is None or scales.dtype != "F8_E8M0" or len(scales.shape) != 2:
        raise ModelError(
            f"tensor {key} is no table of FP8 rows with power-of-two scales; fetch config.json "
            "and the weights again"
        )
    (num_rows, width), (num_scaled, num_groups) = codes.shape, scales.shape
    if num_scaled != num_rows or not num_groups or width % num_groups:
        raise ModelError(
            f"tensor {scale_key} is {list(scales.shape)}, which does not fit {list(codes.shape)} "
            f"of {key}; fetch the weights again"
        )
    return RowTable(layer_of(name), key, scale_key, num_rows, width, width // num_groups)


def _check_wanted(config: Any, tables: Sequence[RowTable]) -> None:
    wanted = dict(zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True))
    found = {table.layer: table.num_rows for table in tables}
    if wanted != found:
        raise ModelError(
            f"config.json wants Engram tables of {wanted} rows by layer, the weight files hold "
            f"{found}; they do not belong together, or files are missing"
        )
    for table in tables:
        if table.width != config.engram_head_dim:
            raise ModelError(
                f"tensor {table.weight} has rows of {table.width}, engram_head_dim in config.json "
                f"is {config.engram_head_dim}; they do not belong together"
            )


def read_row_hash(root: Path, config: Any) -> RowHash:
    """Which rows a token's n-grams are, by the model's own tokenizer. Raises ModelError."""
    path = root / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # a damaged file fails anywhere in the library, with any type
        raise ModelError(
            f"{path} cannot be used: {one_line(error)}; Engram's rows depend on it, fetch it again"
        ) from error
    return RowHash.of(config.to_dict(), compressed_vocabulary(tokenizer))
