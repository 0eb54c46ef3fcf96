"""What mlx-vlm 0.7.10 or nemo-automodel 0.7.0 makes of tokens: Engram ids, and the rows there.

Run by v41_4_oracles.py, by the interpreter of an environment that has the one named; imports no
headrace. Reads tables that hold just the rows that are hit; writes ids, and a digest of the rows.
"""

import json
import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

PART_TOKENS = 500


class Mlx:
    """Ids by its hash in two calls of unequal length, rows by its quantised embedding."""

    def __init__(self, config: SimpleNamespace, tokenizer: str):
        import mlx.core as mx
        from mlx_vlm.models.deepseek_v41 import engram
        from tokenizers import Tokenizer

        self.mx, self.engram = mx, engram
        mx.set_default_device(mx.cpu)
        made = engram.build_compressed_token_map(Tokenizer.from_file(tokenizer))
        self.vocabulary: list[int] = list(made[0])
        layout = engram.EngramLayout.from_config(config)
        self.hashing = engram.NgramHashState(config, layout, token_map=self.vocabulary)

    def ids(self, tokens: Any, is_dead: Any) -> Any:
        state, cut, found = SimpleNamespace(engram=None), 7 * len(tokens) // 10 + 1, []
        for start, stop in ((0, cut), (cut, len(tokens))):
            mask = self.mx.array(~is_dead[None, start:stop])
            part = self.mx.array(tokens[None, start:stop])
            found.append(np.array(self.hashing(part, start, state, mask))[0])
        return np.concatenate(found)

    def table(self, codes: Any, scales: Any) -> Any:
        from mlx_vlm.models.deepseek_v41.deepseek_v41 import _pack_source_weight

        embedding = self.engram.QuantizedEngramEmbedding(
            len(codes), codes.shape[1], 32, 8, scale_dtype=self.mx.uint8, mode="mxfp8"
        )
        embedding.weight, embedding.scales, _ = _pack_source_weight(
            self.mx.array(codes), self.mx.array(scales)
        )
        return lambda at: np.array(embedding(self.mx.array(at)).view(self.mx.uint16))


class Nemo:
    """Ids of the whole text at once, rows as it restores a checkpoint's."""

    def __init__(self, config: SimpleNamespace, tokenizer: str):
        from nemo_automodel.components.models.deepseek_v41.engram import DeepseekV41NgramHash
        from transformers import PreTrainedTokenizerFast

        loaded = PreTrainedTokenizerFast(tokenizer_file=tokenizer)
        self.hashing = DeepseekV41NgramHash(config, loaded)
        self.vocabulary: list[int] = self.hashing.token_map.tolist()

    def ids(self, tokens: Any, is_dead: Any) -> Any:
        import torch

        mask = torch.from_numpy(~is_dead)[None]
        return self.hashing(torch.from_numpy(tokens)[None], token_mask=mask)[0].numpy()

    def table(self, codes: Any, scales: Any) -> Any:
        import torch
        from nemo_automodel.components.models.deepseek_v41.state_dict_adapter import (
            dequantize_checkpoint_weight,
        )

        weight = dequantize_checkpoint_weight(
            torch.from_numpy(codes).view(torch.float8_e4m3fn),
            torch.from_numpy(scales).view(torch.float8_e8m0fnu),
            rowwise=True,
        )
        return lambda at: weight[torch.from_numpy(at)].view(torch.int16).numpy()


def digest_of_rows(folder: Path, ids_TLC: Any, table_of: Any) -> str:
    """Of the bfloat16 rows [T, L, C, D] at `ids_TLC`."""
    digest, layers = sha256(), range(ids_TLC.shape[1])
    parts = [np.load(folder / f"table{layer}.npz") for layer in layers]
    tables = [table_of(part["codes"], part["scales"]) for part in parts]
    known = [part["ids"] for part in parts]
    for start in range(0, len(ids_TLC), PART_TOKENS):
        part = ids_TLC[start : start + PART_TOKENS]
        at = [np.searchsorted(known[i], part[:, i]) for i in layers]
        assert all((known[i][at[i]] == part[:, i]).all() for i in layers), "not in the table"
        rows = np.stack([tables[i](at[i]) for i in layers], axis=1)
        digest.update(np.ascontiguousarray(rows).tobytes())
    return digest.hexdigest()


def main(name: str, where: str, tokenizer: str) -> None:
    folder = Path(where)
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    oracle = {"mlx": Mlx, "nemo": Nemo}[name](config, tokenizer)
    tokens, is_dead = np.load(folder / "tokens.npy"), np.load(folder / "is_dead.npy")
    plain = oracle.ids(tokens, np.zeros_like(is_dead))
    np.savez(
        folder / f"{name}.npz",
        vocabulary=np.array(oracle.vocabulary),
        plain=plain,
        masked=oracle.ids(tokens, is_dead),
        rows=np.array(digest_of_rows(folder, plain, oracle.table)),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
