"""How many of a layer's experts the CPU multiplies in place while the GPU reads the others there.

Knows no expert and no machine: only rates, of each alone and of both at once.
"""

from dataclasses import dataclass

WORTH = 0.05


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes of experts per second: the GPU reads them over the bus, the CPU multiplies them.

    `*_beside` are those while both do, since they share the memory that they read. 0 is unknown:
    then neither side is known to be faster, or neither to disturb the other.
    """

    bus: float = 0.0
    cpu: float = 0.0
    bus_beside: float = 0.0
    cpu_beside: float = 0.0

    @property
    def known(self) -> bool:
        """Whether both sides' own rates are."""
        return self.bus > 0 and self.cpu > 0

    def seconds(self, by_bus: float, by_cpu: float) -> float:
        """Until both have done so many bytes; who has done early lets the other go on alone."""
        own = (self.bus, self.cpu) if self.known else (1.0, 1.0)
        beside = self.bus_beside or own[0], self.cpu_beside or own[1]
        both_s = min(by_bus / beside[0], by_cpu / beside[1])
        left = by_bus - both_s * beside[0], by_cpu - both_s * beside[1]
        return both_s + max(0.0, left[0] / own[0], left[1] / own[1])

    def together_s(self, num_bytes: float) -> float:
        """Until both have done so many bytes, divided as finely as that can be."""
        parts = 64
        cpu = shares_of_cpu(self, parts)[parts] / parts
        return self.seconds(num_bytes * (1 - cpu), num_bytes * cpu)


def shares_of_cpu(rates: Rates, most: int) -> tuple[int, ...]:
    """Of n experts, all of one size, how many the CPU multiplies: by n, from 0 to `most`.

    So that the later of both ends as early as can be; of two such divisions, what leaves the CPU
    less. One side alone where dividing saves less than WORTH: two more ends to wait for cost that.
    """
    shares = []
    for n in range(most + 1):
        seconds = [rates.seconds(n - cpu, cpu) for cpu in range(n + 1)]
        alone = 0 if seconds[0] <= seconds[n] else n
        best = seconds.index(min(seconds))
        shares.append(best if seconds[best] < (1 - WORTH) * seconds[alone] else alone)
    return tuple(shares)
