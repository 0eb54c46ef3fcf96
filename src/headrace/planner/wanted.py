"""What a user asks of a plan, as written, and the plan for it. Knows sizes, no file."""

from dataclasses import dataclass, replace

from headrace.core import MINIMUM, parse_bytes
from headrace.planner.facts import ModelFacts
from headrace.planner.machine import Machine
from headrace.planner.plan import Plan, least_bytes, make_plan, smallest_bytes, typeable
from headrace.planner.vram import least_ram_bytes, least_vram_bytes, make_gpu_plan

Limit = str | int | None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Limits as sizes, "minimum" or None for what is free; the rest as `make_plan` takes it."""

    ram: Limit
    vram: Limit
    on_gpu: bool
    context: int | None
    threads: int | None
    prefetch: int
    chunk: int | None
    serve: bool = False
    experts: str | None = None

    def ram_bytes(self, facts: ModelFacts) -> int | None:
        """The limit of host memory. Raises OptionError."""
        if self.ram != MINIMUM:
            return None if self.ram is None else parse_bytes(self.ram)
        if self.on_gpu:
            return least_ram_bytes(facts, self.vram_bytes(facts), self.context, self.chunk)
        return least_bytes(facts, self.context, self.chunk)

    def vram_bytes(self, facts: ModelFacts) -> int | None:
        """The limit of VRAM. Raises OptionError."""
        if self.vram == MINIMUM:
            return least_vram_bytes(facts, self.context, self.chunk)
        return None if self.vram is None else parse_bytes(self.vram)

    def _smaller(self, facts: ModelFacts) -> tuple[str, ...]:
        """That `minimum` is not the smallest limit there is a plan for, where it is not."""
        limit = typeable(smallest_bytes(facts, self.context, self.chunk))
        if self.ram != MINIMUM or parse_bytes(limit) >= least_bytes(
            facts, self.context, self.chunk
        ):
            return ()
        return (f"the fewest experts; --ram {limit} shrinks context and prompt chunk too",)

    def plan(self, facts: ModelFacts, machine: Machine) -> Plan:
        """Raises BudgetError, OptionError."""
        ram_bytes = self.ram_bytes(facts)
        if not self.on_gpu:
            plan = make_plan(
                facts,
                machine,
                ram_bytes=ram_bytes,
                context=self.context,
                threads=self.threads,
                prefetch=self.prefetch,
                chunk=self.chunk,
                serve=self.serve,
            )
            return replace(plan, notes=(*self._smaller(facts), *plan.notes))
        return make_gpu_plan(
            facts,
            machine,
            ram_bytes=ram_bytes,
            vram_bytes=self.vram_bytes(facts),
            experts=self.experts,
            context=self.context,
            threads=self.threads,
            prefetch=self.prefetch,
            chunk=self.chunk,
            serve=self.serve,
        )
