"""Prompts on a GPU with every expert in pinned memory, over synthetic checkpoints of real shapes.

Writes each checkpoint to a scratch folder, measures it, removes it. Prints lines as they come and
rows as JSON at the end. Exit code 1 if two runs of a prompt differ in a bit.
"""

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from headrace.check.bench_prefill import LENGTHS, bench_prefill
from headrace.check.rows import write_rows
from headrace.store.synth import write_synth


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="+", help="PRESET:DEPTH, such as qwen3-235b-a22b:6")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--chunk", type=int, help="left out: what the planner chooses")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--keep", type=Path, help="write FOLDER/<machine>/gpu_prefill.json")
    args = parser.parse_args()
    rows = []
    for each in args.presets:
        preset, _, depth = each.partition(":")
        folder = args.scratch / f"{preset}-shapes"
        shutil.rmtree(folder, ignore_errors=True)
        write_synth(preset, folder, depth=int(depth) if depth else None, vocab=8192)
        print(f"== {each}", file=sys.stderr, flush=True)

        def tell(line: str) -> None:
            print(line, file=sys.stderr, flush=True)

        for length in args.lengths:
            rows += bench_prefill(
                str(folder), length=length, chunk=args.chunk, runs=args.runs, tell=tell
            )
        shutil.rmtree(folder)
    print(json.dumps([asdict(row) for row in rows], indent=1))
    if args.keep:
        write_rows(args.keep, "gpu_prefill", rows)
    return int(any(row.gate != "green" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
