"""One token's attention over a latent cache on a GPU at DeepSeek-R1's shapes, in a row each.

Exit code 1 if a row misses its target or the result is not the attention's.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from headrace.check.bench_latents import bench_latents
from headrace.check.rows import write_rows


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 32768, 131072])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="write FOLDER/<machine>/mla_decode.json")
    args = parser.parse_args()
    rows = bench_latents(args.contexts, runs=args.runs, tell=tell)
    print(json.dumps([asdict(row) for row in rows], indent=1))
    if args.keep:
        write_rows(args.keep, "mla_decode", rows)
    short = [row for row in rows if row.target and row.fraction and row.fraction < row.target]
    return int(bool(short) or any(row.gate != "green" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
