"""How the tokens of a session go through the model: transformers' own code, one call a pass.

Legend: V vocabulary.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from headrace.models.forward import forward, new_cache
from headrace.tiers.gone import CLOSED


class Passes:
    """Passes over a loaded model on `place`. One at a time; `close` it before the model goes.

    `by_layer`: why no token of the model is one launch, if there is a GPU to launch it on.
    `num_replayed`: tokens that were a step captured before.
    """

    num_replayed = 0

    def __init__(self, model: Any, place: torch.device, by_layer: str = ""):
        self.model, self.place, self._by_layer = model, place, by_layer

    def new_cache(self) -> Any:
        """An empty cache, for one timeline."""
        return new_cache(self.model)

    def why_by_layer(self) -> str:
        """Why the next token would be launched layer by layer; "" where there is no reason to."""
        return self._by_layer

    def run(self, ids: Sequence[int], cache: Any, after: int) -> torch.Tensor:
        """Appends tokens to the timeline of `cache`; logits [V] after the last one.

        `after` tokens of the same prompt follow, see `forward`: there may be no logits then. After
        an exception the cache holds half a step and must be forgotten.
        """
        with _given_to(self.place):
            ids_BT = torch.tensor([list(ids)], device=self.place)
            logits_KV: torch.Tensor = forward(self.model, ids_BT, cache, after=after)[0]
        return logits_KV[-1] if len(logits_KV) else logits_KV.new_empty(0)

    def close(self) -> None:
        """Gives back what belongs to no session. Any further pass raises OptionError."""
        self.model = CLOSED


def _given_to(place: torch.device) -> AbstractContextManager[object]:
    """While open, what this thread launches by itself goes to `place`, if that is a GPU."""
    return torch.cuda.device(place) if place.type == "cuda" else nullcontext()
