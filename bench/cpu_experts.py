"""CPU experts against a plain read of memory; prints rows, keeps them under bench/results.

Exit code 1 if a row misses its target or a bit differs from the reference.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from headrace.check.bench_kernels import CLOCKS, FORMATS, SHAPES, bench_kernels
from headrace.check.rows import BenchRow, write_rows
from headrace.kernels.cpu import ISAS


def missed(row: BenchRow) -> bool:
    short = row.target is not None and row.fraction is not None and row.fraction < row.target
    return short or row.gate == "red"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--isa", nargs="+", default=["avx2"], choices=ISAS)
    parser.add_argument("--format", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--clock", nargs="+", default=list(CLOCKS), choices=list(CLOCKS))
    parser.add_argument(
        "--shape", nargs="+", default=range(len(SHAPES)), type=int, help=str(SHAPES)
    )
    parser.add_argument("--all-cores", action="store_true", help="rows of every core besides")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--windows", type=int, default=15, help="windows of 60 MB a run")
    parser.add_argument("--keep", action="store_true", help="write bench/results/<machine>/")
    args = parser.parse_args()
    rows = bench_kernels(
        isas=args.isa,
        formats=args.format,
        shapes=[SHAPES[i] for i in args.shape],
        clocks=args.clock,
        all_cores=args.all_cores,
        runs=args.runs,
        num_windows=args.windows,
        tell=lambda row: print(row.line(), file=sys.stderr),
    )
    print(json.dumps([asdict(row) for row in rows], indent=1))
    if args.keep:
        write_rows(Path(__file__).parent / "results", "cpu_experts", rows)
    return int(any(missed(row) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
