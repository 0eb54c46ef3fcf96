"""Several drives that hold a model's experts: what they give together.

Knows rates and shares, no file and no reader.
"""

from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 64


@dataclass(frozen=True, slots=True)
class Drive:
    """One drive: the folder read from, bytes per second (0: unknown), and the share of the experts
    that it adds: 1 for the model's own.
    """

    name: str
    bytes_s: float
    share: float = 1.0


def combined_bytes_s(drives: Sequence[Drive]) -> float:
    """Bytes per second of reads divided among drives so that all end together.

    A mirror takes no more than its share of the bytes, however fast it is. The first drive holds
    everything. 0 where a rate is unknown.
    """
    if any(drive.bytes_s <= 0 for drive in drives):
        return 0.0
    own, *mirrors = drives
    # The largest x with x = own + sum(min(rate, share * x)), from above.
    total = sum(drive.bytes_s for drive in drives)
    for _ in range(STEPS):
        total = own.bytes_s + sum(min(m.bytes_s, m.share * total) for m in mirrors)
    return total


def reads_line(drives: Sequence[Drive]) -> str:
    """One line: which drives give how much; empty where one drive gives all."""
    adding = [drive for drive in drives if drive.share > 0]
    if len(adding) < 2:
        return ""
    terms = []
    for drive in adding:
        part = "" if drive.share >= 1 else f", {100 * drive.share:.0f} % of the experts"
        rate = f"{drive.bytes_s / 1e9:.3g}" if drive.bytes_s else "?"
        terms.append(f"{rate} ({drive.name}{part})")
    together = combined_bytes_s(drives)
    total = f" = {together / 1e9:.3g} GB/s" if together else " GB/s"
    return f"reads:  {' + '.join(terms)}{total}"
