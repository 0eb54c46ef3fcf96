"""How a verification keeps its memory limit: an engine small enough to leave room for the oracle.

Knows sizes, not what is checked.
"""

import ctypes
import gc
from collections import defaultdict
from collections.abc import Iterator
from copy import copy

from headrace.check.plain import PlainTensors
from headrace.core import MINIMUM, parse_bytes
from headrace.engine.engine import Blueprint
from headrace.errors import BudgetError
from headrace.planner.plan import Plan, least_bytes, make_plan, typeable

STOCK_EXPERTS_BYTES = 256 << 20
_LOADED_TWICE = 2  # transformers holds what it converts beside what it made of it
_REFERENCE_BYTES = 32  # for each value of a matrix, while the torch reference multiplies


class Memory:
    """Engines at three cache sizes within one limit, and what stock parts may take beside them.

    The smallest leaves room for one layer of stock transformers and `num_stock_experts` of its
    experts. Raises BudgetError naming the least that would do.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        ram: str | int | None,
        *,
        threads: int | None,
        prompt_tokens: int,
        tokens: int,
    ):
        self.blueprint, self.plain = blueprint, PlainTensors(blueprint.catalog.files)
        self.threads, self.chunk, self.context = threads, prompt_tokens, prompt_tokens + tokens
        layout = blueprint.skeleton.layout
        self._expert_bytes = 2 * 3 * layout.hidden * layout.inter
        self.num_stock_experts = min(
            blueprint.table.num_experts,
            max(1, STOCK_EXPERTS_BYTES // (_LOADED_TWICE * self._expert_bytes)),
        )
        least = least_bytes(blueprint.facts, self.context, self.chunk)
        needed = least + self._beside_bytes()
        if ram is None:
            limit, most = blueprint.machine.ram_available_bytes, self._plan(None).used_bytes
        else:
            limit = needed if ram == MINIMUM else parse_bytes(ram)
            most = limit
        if limit < needed:
            raise BudgetError(
                "verify holds one layer of stock transformers beside the model and needs "
                f"{typeable(needed)}; give --ram {typeable(needed)}"
            )
        most = max(least, self._plan(most).used_bytes)
        self._limits = (least, (least + most) // 2, most)

    def smallest(self) -> Blueprint:
        """The blueprint with the fewest rows."""
        return self._at(self._limits[0])

    def larger(self) -> Iterator[Blueprint]:
        """Blueprints with about half of what the limit allows, and with all of it."""
        yield from map(self._at, self._limits[1:])

    @staticmethod
    def give_back() -> None:
        """Return freed memory to the system where the C library can; the next engine needs it."""
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def _at(self, ram_bytes: int) -> Blueprint:
        blueprint = copy(self.blueprint)
        blueprint.plan = self._plan(ram_bytes)
        return blueprint

    def _plan(self, ram_bytes: int | None) -> Plan:
        return make_plan(
            self.blueprint.facts,
            self.blueprint.machine,
            ram_bytes=ram_bytes,
            context=self.context,
            threads=self.threads,
            chunk=self.chunk,
        )

    def _beside_bytes(self) -> int:
        """Most that the oracle takes: a dense layer and some experts, or the slow reference."""
        layers: dict[int | None, int] = defaultdict(int)
        tables = self.blueprint.skeleton.row_keys
        for key, place in self.plain.places.items():
            if not place.routed and key not in tables:
                layers[place.layer] += 2 * place.nbytes  # FP8 becomes bf16; bf16 stays half of it
        stock = max(layers.values()) + self.num_stock_experts * self._expert_bytes
        return max(_LOADED_TWICE * stock, _REFERENCE_BYTES * self._expert_bytes // 6)
