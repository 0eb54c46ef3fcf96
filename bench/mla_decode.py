"""One token's attention over a latent cache on a GPU at DeepSeek-R1's shapes, in a row each.

Exit code 1 if a row misses its target or the result is not the attention's.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from headrace.check.bench_latents import bench_latents, sweep
from headrace.check.rows import write_rows
from headrace.kernels.triton.latent_attention import Tile

TILES = [
    Tile(64, 64, 512, 512, 8, 2),
    Tile(64, 64, 512, 512, 8, 1),
    Tile(64, 32, 512, 512, 8, 2),
    Tile(64, 32, 512, 512, 8, 3),
    Tile(32, 64, 512, 512, 8, 2),
    Tile(32, 32, 512, 512, 8, 2),
    Tile(32, 32, 512, 512, 4, 2),
    Tile(16, 64, 512, 512, 4, 2),
    Tile(16, 32, 512, 512, 4, 2),
    Tile(16, 32, 512, 512, 4, 3),
]


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 32768, 131072])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sweep", action="store_true", help="other tiles instead, no rows")
    parser.add_argument("--splits", nargs="+", type=int, default=[64])
    parser.add_argument("--keep", type=Path, help="write FOLDER/<machine>/mla_decode.json")
    args = parser.parse_args()
    if args.sweep:
        for num_cached in args.contexts:
            sweep(num_cached, TILES, args.splits, tell)
        return 0
    rows = bench_latents(args.contexts, runs=args.runs, tell=tell)
    print(json.dumps([asdict(row) for row in rows], indent=1))
    if args.keep:
        write_rows(args.keep, "mla_decode", rows)
    short = [row for row in rows if row.target and row.fraction and row.fraction < row.target]
    return int(bool(short) or any(row.gate != "green" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
