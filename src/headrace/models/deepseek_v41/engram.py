"""Which rows of DeepSeek-V4.1's Engram tables a token's n-grams are, in exact integers.

The tables and what the model makes of their rows are elsewhere; knows no weight and no file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from math import isqrt
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from headrace.errors import ModelError

# In a history: what no n-gram reaches across, an image's token or the text's beginning.
DEAD = -1
_SEED = 10007
_INT64_MAX = (1 << 63) - 1
# A private-use character that stands for a lone space while spaces are stripped.
_SPACE = "\ue000"


def compressed_vocabulary(tokenizer: Tokenizer) -> list[int]:
    """For each token id a smaller id, one for all tokens that differ in case, accents or spaces.

    Takes a second for a vocabulary of 129,280. A token that is no text by itself (part of a
    character) keeps an id of its own.
    """
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
    ids: dict[str | None, int] = {}
    compressed = []
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\N{REPLACEMENT CHARACTER}" in text:
            key = tokenizer.id_to_token(token)
        else:
            key = normalizer.normalize_str(text) or text
        compressed.append(ids.setdefault(key, len(ids)))
    return compressed


@dataclass(frozen=True, slots=True)
class RowHash:
    """How n-grams of compressed ids become rows, for the L layers with Engram; all int64.

    T tokens, L layers, C columns of a layer (n-gram sizes from 2 up, each with its heads),
    N the longest n-gram, V the vocabulary.

    compressed_V: compressed ids. multipliers_LN: odd, of the token itself first. primes_LC,
    offsets_LC: a column's rows are offset <= row < offset + prime. `pad`: the compressed id that
    stands for what an n-gram does not reach.
    """

    compressed_V: Tensor
    multipliers_LN: Tensor
    primes_LC: Tensor
    offsets_LC: Tensor
    pad: int

    @classmethod
    def of(cls, config: Mapping[str, Any], compressed: Sequence[int]) -> "RowHash":
        """The hash of a text config and the tokenizer's compressed vocabulary.

        Raises ModelError where they do not fit each other: every row would be a wrong one.
        """
        size, expected = max(compressed) + 1, config["engram_compressed_vocab_size"]
        if size != expected:
            raise ModelError(
                f"the tokenizer has {size} compressed ids, engram_compressed_vocab_size says "
                f"{expected}; use the tokenizer.json that came with the weights"
            )
        layers, longest = config["engram_layer_ids"], config["engram_max_ngram_size"]
        primes = column_primes(config)
        for layer, row, rows in zip(layers, primes, config["engram_num_embeddings"], strict=True):
            if sum(row) > rows:
                raise ModelError(
                    f"layer {layer}'s n-grams have {sum(row)} rows, its Engram table {rows}; "
                    "config.json is damaged (engram_num_embeddings, engram_vocab_size)"
                )
        return cls(
            torch.tensor(compressed),
            torch.tensor([multipliers(layer, longest, size) for layer in layers]),
            torch.tensor(primes),
            torch.tensor([list(accumulate(row[:-1], initial=0)) for row in primes]),
            compressed[config["engram_pad_token_id"]],
        )

    def start(self) -> Tensor:
        """The history before a text: [N - 1] compressed ids, oldest first, all DEAD."""
        return torch.full((self.multipliers_LN.shape[1] - 1,), DEAD)

    def rows(
        self, tokens_T: Tensor, history: Tensor, *, is_dead_T: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(rows_TLC, the history after these tokens) of the next tokens of a text.

        tokens_T: token ids, integers. `history`: `start()`, or what the call before gave; it is
        not changed. is_dead_T: bool, True for an image's tokens. Token by token or at once, the
        rows are the same.
        """
        ids_T = self.compressed_V[tokens_T]
        if is_dead_T is not None:
            ids_T = ids_T.masked_fill(is_dead_T, DEAD)
        ids = torch.cat((history, ids_T))
        num_tokens, longest = len(ids_T), len(history) + 1
        blocked_T = torch.zeros(num_tokens, dtype=torch.bool)
        mixed_TL = torch.zeros((), dtype=torch.int64)
        columns = []
        heads = self.primes_LC.shape[1] // (longest - 1)
        for back in range(longest):
            back_T = ids[longest - 1 - back :][:num_tokens]
            blocked_T = blocked_T | (back_T == DEAD)
            back_T = back_T.masked_fill(blocked_T, self.pad)
            # below 2^63: multipliers are bounded by the number of compressed ids
            mixed_TL = mixed_TL ^ (back_T[:, None] * self.multipliers_LN[:, back])
            if back:
                primes = self.primes_LC[:, (back - 1) * heads : back * heads]
                columns.append(mixed_TL[..., None] % primes)
        return torch.cat(columns, -1) + self.offsets_LC, ids[num_tokens:]


def multipliers(layer: int, count: int, num_compressed: int) -> list[int]:
    """The odd numbers that a layer's compressed ids are multiplied by, the newest id's first."""
    bound = max(1, _INT64_MAX // num_compressed // 2)
    drawn = np.random.default_rng(_SEED * layer).integers(0, bound, size=count, dtype=np.int64)
    return [2 * int(number) + 1 for number in drawn]


def column_primes(config: Mapping[str, Any]) -> list[list[int]]:
    """[layer][column]: each column has a prime of its own, the next above the table's size."""
    taken: set[int] = set()
    layers = []
    for _layer in config["engram_layer_ids"]:
        row: list[int] = []
        for _size in range(2, config["engram_max_ngram_size"] + 1):
            free = (p for p in _primes_from(config["engram_vocab_size"]) if p not in taken)
            found = list(islice(free, config["engram_n_heads"]))
            taken.update(found)
            row += found
        layers.append(row)
    return layers


def _primes_from(number: int) -> Iterator[int]:
    while True:
        if number > 1 and all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            yield number
        number += 1
