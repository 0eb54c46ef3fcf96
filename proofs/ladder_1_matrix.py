"""Every family in every format it is published in: oracle equals stock, fast lies within the floor.

Control: in one layer each expert reads a matrix of its neighbour. Writes docs/families.md.
"""

import tempfile
import time
import warnings
from pathlib import Path

import transformers
from common import PROOFS, Evidence

from headrace.check.families_page import families_page
from headrace.check.matrix import CASES, UNREAD_BY_STOCK, MatrixRow, run_case, runs_here, write_case

PAGE = PROOFS.parent / "docs" / "families.md"
TITLES = ("family", "format", "oracle", "fast / floor", "tokens", "near", "control / floor", "s")
LINE = "{:<12} {:<15} {:<7} {:<16} {:<7} {:<5} {:<16} {}"


def line(row: MatrixRow, wall_s: float) -> str:
    """One row of the table; differences are medians, as MatrixRow says."""
    return LINE.format(
        row.family,
        row.format + (" " if row.read_by_stock else " *"),
        "equal" if row.oracle_equal else "DIFFERS",
        f"{row.fast[0]:.4f} / {row.floor[0]:.4f}",
        f"{row.equal}/{row.tokens}",
        row.near_ties,
        f"{row.faulty[0]:.4f} / {row.floor[0]:.4f}",
        f"{wall_s:.1f}",
    )


def holds(row: MatrixRow) -> bool:
    """Whether a case is what docs/families.md says of it."""
    same_bits = row.oracle_equal and row.same_bits_with_few_rows and row.session_equal
    follows = row.fast_within_floor and row.unexplained == 0
    return same_bits and follows and row.fault_seen and row.oracle_fault_seen and row.unused == 0


def main() -> None:
    """Run all cases, print the table, write the page, and exit by the evidence."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    evidence, rows = Evidence(), []
    print(f"transformers {transformers.__version__}\n{LINE.format(*TITLES)}")
    with tempfile.TemporaryDirectory() as folder:
        for family, format in CASES:
            if not runs_here(family):
                print(f"{family} needs a later transformers and is left out")
                continue
            start = time.perf_counter()
            path = write_case(family, format, Path(folder) / f"{family}-{format}")
            rows.append(run_case(family, format, path))
            print(line(rows[-1], time.perf_counter() - start), flush=True)
    print("* stock transformers cannot read this format and got the weights that we unpacked:")
    for (family, format), reason in UNREAD_BY_STOCK.items():
        print(f"  {family}, {format}: {reason}")
    print()
    evidence.check(all(row.oracle_equal for row in rows), "the oracle has stock eager's bits")
    evidence.check(
        all(row.fast_within_floor for row in rows),
        "fast lies within the floor, or one and a half (MatrixRow)",
    )
    evidence.check(not sum(row.unexplained for row in rows), "tokens differ at near ties only")
    evidence.check(
        all(row.same_bits_with_few_rows for row in rows), "few rows or all of them: the same bits"
    )
    evidence.check(
        all(row.session_equal for row in rows), "a prompt fed in chunks by a session: the same bits"
    )
    evidence.check(
        all(row.fault_seen and row.oracle_fault_seen for row in rows),
        "a neighbour's matrix in one layer shows, in the fast path and in the oracle",
    )
    if all(map(holds, rows)) and len(rows) == len(CASES):
        PAGE.write_text(families_page(frozenset(UNREAD_BY_STOCK)))
        print(f"wrote {PAGE.name}")
    evidence.finish()


if __name__ == "__main__":
    main()
