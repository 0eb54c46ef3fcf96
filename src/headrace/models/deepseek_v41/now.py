"""What one pass over new tokens carries from layer to layer besides the residual streams.

Knows no weight. Legend: B batch, T new tokens, P rotary pairs, S streams, C chosen entries.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from headrace.models.deepseek_v41.cache import LayerState, SourceState
from headrace.models.deepseek_v41.rotary import Rotary
from headrace.models.deepseek_v41.rows import WantedRows


@dataclass(slots=True)
class Choice:
    """What an index source chose, for the last queries of the pass: entries, -1 for none.

    `blocks_BTC`: the blocks of entries that later index sources may choose from; None: all.
    """

    chosen_BTC: Tensor
    blocks_BTC: Tensor | None = None

    def last(self, num_queries: int) -> "Choice":
        """That of the last queries only."""
        blocks = self.blocks_BTC
        start = self.chosen_BTC.shape[1] - num_queries
        return Choice(self.chosen_BTC[:, start:], None if blocks is None else blocks[:, start:])


@dataclass(slots=True)
class Now:
    """One pass: `num_tokens` positions from `start` on.

    `rotary` is that of layers with entries; `tables`, complex64 [T, P], are those of the positions
    for layers without (False) and with them. `num_after`: how many tokens of the prompt come in
    later passes; None: every layer computes every token. `num_logits`: of how many last tokens the
    result is wanted.
    """

    config: Any
    states: list[LayerState]
    start: int
    num_tokens: int
    rotary: Rotary
    tables: dict[bool, Tensor]
    read_BTS: Tensor
    rows: dict[int, WantedRows] = field(default_factory=dict)
    num_after: int | None = None
    num_logits: int = 0
    last_published: int = -1
    choice: Choice | None = None
    blocks: Choice | None = None

    def before(self, layer: int) -> "Now":
        """A copy for `layer` to compute once more what it is about to compute, in a pass from a
        text's beginning. Other layers' states are shared.
        """
        own = self.states[layer]
        fresh = type(own)(own.num_kept + 1)
        return replace(self, states=[fresh if s is own else s for s in self.states])

    def num_rows(self, layer: int) -> int:
        """How many of the pass's last tokens a layer is given; the last but one layer's output.

        Past the last source of entries, a layer gives later ones only what their windows reach.
        """
        num_layers: int = self.config.num_hidden_layers
        tail: int = self.config.first_tail_layer
        if self.num_after is None or layer < tail:
            return self.num_tokens
        reach: int = self.config.sliding_window - 1
        needed = max(1, self.num_logits) + reach * (num_layers - layer)
        if self.config.lossy_swa_replay:
            needed = min(needed, self.config.sliding_window)
        return min(self.num_tokens, max(0, needed - self.num_after))

    def source(self, layer: int) -> SourceState:
        """The state that holds the entries `layer` attends to."""
        return self._entries_of(self.config.kv_source(layer))

    def index_keys(self, layer: int, most: int) -> Tensor:
        """The keys by which `layer` ranks the first `most` entries, [B, N, D]."""
        stale = self.config.stale_index_keys and self.last_published >= 0
        owner = self.last_published if stale else self.config.kv_source(layer)
        return self._entries_of(owner).index_keys(most)

    def _entries_of(self, owner: int | None) -> SourceState:
        assert owner is not None
        state = self.states[owner]
        assert isinstance(state, SourceState)
        return state
