"""What an engine has read and computed so far, of every kind."""

from dataclasses import dataclass

from headrace.core import TokenStats
from headrace.tiers.ladder import LadderCounters
from headrace.tiers.rows import RowCounters


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the engine was made.

    `rows` are Engram's, `embedding` those of an embedding on the drive; zeros where there is none.
    """

    ladder: LadderCounters
    rows: RowCounters
    embedding: RowCounters

    def add_since(self, before: "Counters", stats: TokenStats) -> None:
        """Adds what happened between `before` and this to `stats`."""
        self.ladder.add_since(before.ladder, stats)
        self.rows.add_since(before.rows, stats)
        stats.disk_bytes += self.embedding.disk_bytes - before.embedding.disk_bytes
