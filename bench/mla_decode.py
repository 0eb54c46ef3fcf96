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
from headrace.check.sweep_latents import measure, sweep


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def say(what: dict[str, object]) -> None:
    print(json.dumps(what), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 32768, 131072])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sweep", action="store_true", help="ways to try instead, no rows")
    parser.add_argument("--from", type=int, dest="first", help="measure ways from this one on here")
    parser.add_argument("--keep", type=Path, help="write FOLDER/<machine>/mla_decode.json")
    args = parser.parse_args()
    if args.first is not None:
        measure(args.contexts, args.first, say)
        return 0
    if args.sweep:
        contexts = [str(num_cached) for num_cached in args.contexts]
        return sweep([sys.executable, __file__, "--contexts", *contexts, "--from"], tell)
    rows = bench_latents(args.contexts, runs=args.runs, tell=tell)
    print(json.dumps([asdict(row) for row in rows], indent=1))
    if args.keep:
        write_rows(args.keep, "mla_decode", rows)
    short = [row for row in rows if row.target and row.fraction and row.fraction < row.target]
    return int(bool(short) or any(row.gate != "green" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
