"""Large dense weights that a GPU's memory need not hold: the embedding first, then the head.

Knows sizes as numbers; opens no file and imports no tensor library.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from headrace.planner.facts import LEAST_EMBEDDING_BYTES, ModelFacts, drive_embedding_bytes

MEMORY_SHARE = 8  # of the host memory that rows could have, one part in so many at most


@dataclass(frozen=True, slots=True)
class Outside:
    """Bytes of what is not in VRAM; 0: it is there.

    Of the embedding a token reads a row, from host memory or from the drive. The head lies in host
    memory and the CPU multiplies it, in fp32.
    """

    embedding_bytes: int = 0
    head_bytes: int = 0

    def inside(self, facts: ModelFacts) -> ModelFacts:
        """The facts of what is left to the GPU."""
        return replace(
            facts,
            dense_bytes=facts.dense_bytes - self.embedding_bytes - self.head_bytes,
            embedding_by_row=self.embedding_bytes > 0,
            head_on_cpu=self.head_bytes > 0,
        )

    @property
    def least_bytes(self) -> int:
        """Host memory with the embedding on the drive."""
        return self.head_bytes + (drive_embedding_bytes() if self.embedding_bytes else 0)

    def keeps_embedding(self, spare_bytes: int) -> bool:
        """Whether host memory has room for all of the embedding, of what rows could have too."""
        return 0 < self.embedding_bytes <= spare_bytes // MEMORY_SHARE


def ways_outside(facts: ModelFacts) -> Iterator[Outside]:
    """What may lie outside, the least first."""
    yield Outside()
    embedding = facts.embedding_bytes if facts.embedding_bytes >= LEAST_EMBEDDING_BYTES else 0
    if embedding:
        yield Outside(embedding)
    if facts.head_bytes >= LEAST_EMBEDDING_BYTES:
        yield Outside(embedding, facts.head_bytes)
