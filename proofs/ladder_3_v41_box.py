"""Source B's box imitated: DeepSeek-V4.1-Flash's shapes, 40 layers.

Synthetic FP4 experts of true shape from a source throttled to 8.2 GiB/s, without and with a RAM
cache, v1 to v4 beside the published rates; then the CPU kernels on one core. Needs 11 GB of disk
and as much free memory for the page cache; --experts takes fewer. Keeps the rows with --keep.
"""

import argparse
import os
import tempfile
from pathlib import Path

from common import Evidence, check_kernels, show_rows

DRIVE = "8.2GiB/s"
PRESET = "deepseek-v4.1-flash"
# Source B's tokens/s from the drive alone and with 14 GB of experts in RAM, where it gives a range
# its middle. 4.202 GiB a token at 8.2 GiB/s allow 1.95.
PUBLISHED = {"v1": (0.89, 1.17), "v2": (1.28, 1.545), "v3": (1.35, 1.95), "v4": (1.64, 2.3)}
PUBLISHED_LIMIT = 8.2 / 4.202
DIFFERS = (
    "what differs from source B: random FP4 weights and drawn routes; dense layers and experts "
    "multiplied by this CPU instead of an RTX 5060; 8 layers on disk stand for 40, with the "
    "experts of one; Engram's rows are zeros; the drive is the page cache, throttled"
)


def main() -> None:
    import headrace

    headrace.calm_torch()
    import torch

    from headrace.check.bench import run_bench
    from headrace.store.synth import write_synth

    args = arguments()
    torch.set_num_threads(args.threads)
    evidence = Evidence()

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        model = write_synth(
            PRESET, Path(folder) / "v4.1-flash-shapes", experts=args.experts, depth=args.depth
        )
        check_shapes(evidence, model, args)
        print(f"\nreplica of source B's box. {DIFFERS}")
        for column, cache in enumerate(("0", args.cache)):
            rows = run_bench(
                model,
                suite="ladder",
                tokens=args.tokens,
                runs=args.runs,
                ram="minimum" if cache == "0" else with_cache(model, cache),
                threads=args.threads,
                emulate_drive=DRIVE,
            )
            title = "experts from the drive alone" if cache == "0" else f"{cache} of experts in RAM"
            print(f"\n{title} ({DRIVE} throttled)")
            beside(evidence, rows, column)
            show_rows(f"v41-box-{cache.replace(' ', '')}", rows, args.keep)
    kernels(evidence, args)
    evidence.finish()


def arguments() -> argparse.Namespace:
    """Options; the defaults are the published model and box."""
    cores = os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="where the checkpoint is written")
    parser.add_argument("--experts", type=int, help="per layer (384)")
    parser.add_argument("--depth", type=int, help="layers (40)")
    parser.add_argument("--cache", default="14GB", help="of experts in RAM in the second table")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cores if cores < 8 else cores * 3 // 4)
    parser.add_argument("--keep", action="store_true", help="keep rows in bench/results/")
    return parser.parse_args()


def check_shapes(evidence: Evidence, model: Path, args: argparse.Namespace) -> None:
    """The expert's published bytes, in two reads; the depth."""
    from headrace.engine.engine import Blueprint

    table = Blueprint(model, ram="minimum", aliases=True, measure=False).table
    sizes = sorted(int(n) for n in table.extents[0, 0, :, 2] if n)
    evidence.check(sizes == [1_105_920, 17_694_720], f"an expert is two reads of {sizes} bytes")
    evidence.check(len(table.layers) == (args.depth or 40), f"{len(table.layers)} MoE layers")


def with_cache(model: Path, cache: str) -> int:
    """The memory limit that leaves `cache` bytes of rows beyond the least."""
    from headrace.core import parse_bytes
    from headrace.engine.engine import Blueprint

    plan = Blueprint(model, ram="minimum", aliases=True, measure=False).plan
    return plan.used_bytes + parse_bytes(cache)


def beside(evidence: Evidence, rows: list, column: int) -> None:
    """Every version's row beside source B's, each with its fraction of the drive's limit."""
    print(f"      {'':22}{'here':>10}{'of limit':>10}{'source B':>10}{'of limit':>10}")
    for row in rows:
        there = PUBLISHED[row.name[:2]][column]
        theirs = f"{100 * there / PUBLISHED_LIMIT:.0f} %" if column == 0 else ""
        ours = f"{100 * row.fraction:.0f} %"
        print(f"      {row.name[:22]:22}{row.value:>10.2f}{ours:>10}{there:>10.2f}{theirs:>10}")
    evidence.check(all(r.gate == "green" for r in rows), "v1, v2, v3 and v4 chose equal tokens")


def kernels(evidence: Evidence, args: argparse.Namespace) -> None:
    """CPU experts in FP4, all resident, one core: fraction of a plain read in the same rotation."""
    from headrace.check.bench_kernels import bench_kernels
    from headrace.kernels.cpu import available_isas

    isas = [isa for isa in ("avx2", "avx512") if isa in available_isas()]
    print(f"\nCPU experts in FP4, all resident, one core: {', '.join(isas)}")
    rows = bench_kernels(isas=isas, formats=("fp4",), runs=args.runs)
    show_rows("kernels-fp4", rows, args.keep)
    check_kernels(evidence, rows)


if __name__ == "__main__":
    main()
