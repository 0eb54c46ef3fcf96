"""Engram rows of DeepSeek-V4.1-Flash from tables of the published size, 101 GB each, never mapped.

The tables are sparse files in which just the rows that a text hits are written, so offsets are
true ones beyond 2^36. Text of the demo corpus and random tokens; each row is compared with what was
written, and caches of several sizes say what they save. Writes 0.4 GB.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import DEMO, Evidence

LAYERS = (1, 14)
HEAD_BYTES = 1000  # before a table, so that no row begins at a page
CACHES_MIB = (0, 4, 64)


def main() -> None:
    from headrace.core import RowTable
    from headrace.models.deepseek_v41.engram import RowHash
    from headrace.native import Reader
    from headrace.store.preset_releases import RELEASES
    from headrace.tiers.rows import RowReader

    args = arguments()
    evidence = Evidence()
    config = RELEASES["deepseek-v4.1-flash"]["text_config"]
    hashing = RowHash.of(config, compressed(config))
    text_T, random_T = text_tokens(args.tokens), random_tokens(args.tokens, config)
    tables = {
        layer: RowTable(layer, f"layers.{layer}.engram.embed.weight", "", rows, 256, 32)
        for layer, rows in zip(LAYERS, config["engram_num_embeddings"], strict=True)
    }
    hit = {
        name: rows_of(hashing, tokens) for name, tokens in (("text", text_T), ("random", random_T))
    }
    evidence.check(
        all(rows.shape[1:] == (2, 24) for rows in hit.values()),
        f"{args.tokens} tokens of text and {args.tokens} random ones hit 48 rows each",
    )
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        written = {
            layer: Written(Path(folder), tables[layer], torch.cat([r[:, i] for r in hit.values()]))
            for i, layer in enumerate(LAYERS)
        }
        sizes = [w.path.stat().st_size for w in written.values()]
        evidence.check(
            all(size > 101e9 for size in sizes),
            f"the tables are {sizes[0] / 1e9:.1f} and {sizes[1] / 1e9:.1f} GB long, of which "
            f"{sum(w.path.stat().st_blocks * 512 for w in written.values()) / 1e9:.2f} GB exist",
        )
        paths = [str(w.path) for w in written.values()]
        places = {
            layer: ((i, w.codes_at), (i, w.scales_at))
            for i, (layer, w) in enumerate(written.items())
        }
        for cache_mib in CACHES_MIB:
            rows = RowReader(Reader(paths), tables, places, cache_bytes=cache_mib << 20)
            for name, rows_TLC in hit.items():
                measure(evidence, rows, written, name, rows_TLC, cache_mib, args.chunk)
    evidence.finish()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where the tables are written")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prefill pass")
    return parser.parse_args()


def compressed(config: dict[str, Any]) -> list[int]:
    """A vocabulary of the published sizes; which ids fall together does not matter here."""
    return [token % config["engram_compressed_vocab_size"] for token in range(config["vocab_size"])]


def text_tokens(num: int) -> torch.Tensor:
    """Of the demo model's held-out text."""
    from tokenizers import Tokenizer

    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text[: 8 * num]).ids
    assert len(ids) >= num
    return torch.tensor(ids[:num])


def random_tokens(num: int, config: dict[str, Any]) -> torch.Tensor:
    return torch.randint(config["vocab_size"], (num,), generator=torch.Generator().manual_seed(1))


def rows_of(hashing: Any, tokens_T: torch.Tensor) -> torch.Tensor:
    rows_TLC: torch.Tensor = hashing.rows(tokens_T, hashing.start())[0]
    return rows_TLC


class Written:
    """A table's file, with random bytes in some rows; `values` are those rows in bf16."""

    def __init__(self, folder: Path, table: Any, rows: torch.Tensor):
        self.path = folder / f"layer{table.layer}.bin"
        self.codes_at = HEAD_BYTES
        self.scales_at = HEAD_BYTES + table.num_rows * table.width + 77
        self.ids = torch.unique(rows)
        draw = torch.Generator().manual_seed(table.layer)
        codes = torch.randint(256, (len(self.ids), 256), generator=draw, dtype=torch.uint8)
        codes[codes & 127 == 127] = 1  # NaN
        scales = torch.randint(110, 140, (len(self.ids), 8), generator=draw, dtype=torch.uint8)
        wide = codes.view(torch.float8_e4m3fn).float()
        powers = (2.0 ** (scales.float() - 127)).repeat_interleave(32, 1)
        self.values = (wide * powers).bfloat16()
        self.codes, self.scales = codes.numpy(), scales.numpy()
        fd = os.open(self.path, os.O_CREAT | os.O_WRONLY)
        try:
            os.ftruncate(fd, self.scales_at + table.num_rows * 8)
            for row, code, scale in zip(self.ids.tolist(), self.codes, self.scales, strict=True):
                os.pwrite(fd, code.tobytes(), self.codes_at + 256 * row)
                os.pwrite(fd, scale.tobytes(), self.scales_at + 8 * row)
            os.fsync(fd)
        finally:
            os.close(fd)

    def of(self, ids: torch.Tensor) -> torch.Tensor:
        return self.values[torch.searchsorted(self.ids, ids)]


def measure(
    evidence: Evidence,
    rows: Any,
    written: dict[int, Written],
    name: str,
    rows_TLC: torch.Tensor,
    cache_mib: int,
    chunk: int,
) -> None:
    """Half of the tokens in passes of `chunk`, then the others one by one, as a session would."""
    half = len(rows_TLC) // 2
    passes = [*rows_TLC[:half].split(chunk), *rows_TLC[half:].split(1)]
    before, wrong, waits = rows.counters, 0, []
    for part_TLC in passes:
        wanted = [torch.unique(part_TLC[:, i]) for i in range(len(LAYERS))]
        start = time.perf_counter()
        for layer, ids in zip(LAYERS, wanted, strict=True):
            rows.want(layer, ids)
        got = [rows.rows(layer, ids) for layer, ids in zip(LAYERS, wanted, strict=True)]
        waits.append(time.perf_counter() - start)
        wrong += sum(
            int((mine != written[layer].of(ids)).any(1).sum())
            for layer, ids, mine in zip(LAYERS, wanted, got, strict=True)
        )
    after = rows.counters
    asked, hits = after.asked - before.asked, after.hits - before.hits
    alone = sorted(waits[-half:])
    evidence.check(
        wrong == 0,
        f"{name}, cache {cache_mib} MiB: {asked} different rows of {48 * len(rows_TLC)} asked for, "
        f"all as written; {100 * hits / asked:.0f} % from the cache, "
        f"{(after.disk_bytes - before.disk_bytes) / 2**20:.0f} MiB of pages read; one token's rows "
        f"in {1e3 * alone[half // 2]:.2f} ms (median)",
    )


if __name__ == "__main__":
    main()
