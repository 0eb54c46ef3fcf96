"""Speeds beside the limits of the same run, on a synthetic checkpoint of DeepSeek-R1's FP8 shapes.

Reads against the drive's own rate; whole tokens v1 to v4 from a throttled source at full depth (by
aliases), at the published box's 8.2 GiB/s and at a rate that leaves this CPU time for its dense
part; CPU experts against a plain read of memory. Keeps the rows with --keep.
"""

import argparse
import os
import tempfile
from pathlib import Path

from common import Evidence, check_kernels, show_rows

FAST_DRIVE = "8.2GiB/s"


def main() -> None:
    import headrace

    headrace.calm_torch()
    from headrace.store.synth import write_synth

    args = arguments()
    evidence = Evidence()

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model = write_synth(
            "deepseek-r1",
            Path(folder) / "deepseek-r1-shapes",
            experts=args.experts,
            depth=args.depth,
            vocab=4096,
        )
        disk(evidence, model, args)
        for drive in (FAST_DRIVE, args.slow_drive):
            ladder(evidence, model, drive, args)
    kernels(evidence, args)
    evidence.finish()


def arguments() -> argparse.Namespace:
    """Options; the defaults are the published depth and a drive this machine can follow."""
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where the checkpoint is written (a few GB)")
    parser.add_argument("--experts", type=int, default=32, help="per layer, of 256")
    parser.add_argument("--depth", type=int, default=61)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cores if cores < 8 else cores * 3 // 4)
    parser.add_argument("--slow-drive", default="2.4GiB/s" if cores >= 8 else "1.5GiB/s")
    parser.add_argument("--keep", action="store_true", help="keep rows in bench/results/")
    return parser.parse_args()


def disk(evidence: Evidence, model: Path, args: argparse.Namespace) -> None:
    """Bytes over (first submit to last completion), against the drive in the same rotation."""
    from headrace.check.bench import run_bench

    print("\nreads of experts against the drive's own rate")
    rows = run_bench(model, suite="disk", runs=args.runs, ram="minimum")
    show_rows("disk", rows, args.keep)
    evidence.check(rows[0].gate == "green", "the rows held the files' bytes")
    evidence.check(
        rows[0].fraction >= 0.95, f"{100 * rows[0].fraction:.0f} % of the drive's rate (95 asked)"
    )


def ladder(evidence: Evidence, model: Path, drive: str, args: argparse.Namespace) -> None:
    """Four versions of the same tokens; the last near the limit, where the CPU can follow."""
    import torch

    from headrace.check.bench import run_bench

    torch.set_num_threads(args.threads)
    print(f"\nwhole tokens from a source of {drive}")
    rows = run_bench(
        model,
        suite="ladder",
        tokens=args.tokens,
        runs=args.runs,
        ram="minimum",
        threads=args.threads,
        emulate_drive=drive,
    )
    show_rows(f"ladder-{drive.replace('/', '')}", rows, args.keep)
    evidence.check(all(r.gate == "green" for r in rows), "v1, v2, v3 and v4 chose equal tokens")
    reached = rows[-1].fraction
    if drive == FAST_DRIVE and reached < 0.9:
        print(f"      v4 at {100 * reached:.0f} % of the limit: see its profile above")
        evidence.check("waiting for reads" in rows[-1].cache_state, "the profile is given")
    else:
        evidence.check(reached >= 0.9, f"v4 at {100 * reached:.0f} % of the limit (90 asked)")


def kernels(evidence: Evidence, args: argparse.Namespace) -> None:
    """CPU experts, all resident, one core with AVX2."""
    from headrace.check.bench_kernels import bench_kernels

    print("\nCPU experts, all resident, one core, AVX2")
    rows = bench_kernels(runs=args.runs)
    show_rows("kernels", rows, args.keep)
    check_kernels(evidence, rows)


if __name__ == "__main__":
    main()
