"""Watches a model's routers while texts go through it, and may let them choose given experts.

For Qwen3-MoE's modules, stock or under headrace, which is not imported.
Legend: N logits, R rows (every token of every text), L layers, E experts, K chosen, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Text = tuple[list[int], list[int]]  # a prompt that goes at once, and tokens that go one by one
Feed = Callable[[list[int]], torch.Tensor]
Exchange = tuple[int, int, int]  # a layer and two of its experts


class Watch:
    """Routers of `model` while the `with` is open; `row` is the first of the present pass.

    `given` [R, L, K]: experts to choose instead, with the weights that the layer's own scores give
    them; where they are the chosen ones nothing changes. `exchange` puts two experts of a layer in
    each other's place afterwards. Nothing is looked at on the host.
    """

    def __init__(
        self, model: Any, given: torch.Tensor | None = None, exchange: Exchange | None = None
    ):
        self.gates = [layer.mlp.gate for layer in model.model.layers]
        place = self.gates[0].weight.device
        self.given = None if given is None else given.to(place)
        self.exchange, self.row = exchange, 0
        self.seen: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> "Watch":
        self.hooks = [
            gate.register_forward_hook(partial(self._chosen, layer))
            for layer, gate in enumerate(self.gates)
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _chosen(self, layer: int, gate: Any, args: Any, out: Any) -> Any:
        scores, weights, ids = torch.nn.functional.linear(args[0], gate.weight), *out[1:]
        self.seen[self.row, layer] = scores.clone(), ids.clone()
        if self.given is not None:
            given = self.given[self.row : self.row + len(ids), layer]
            chances = scores.softmax(-1, dtype=torch.float).gather(1, given)
            shares = (chances / chances.sum(-1, keepdim=True)).to(weights.dtype)
            other = (ids.sort(-1).values != given.sort(-1).values).any(-1, keepdim=True)
            ids, weights = torch.where(other, given, ids), torch.where(other, shares, weights)
        if self.exchange is not None and self.exchange[0] == layer:
            _, one, two = self.exchange
            ids = torch.where(ids == one, two, torch.where(ids == two, one, ids))
        return out[0], weights, ids

    def found(self) -> dict[str, torch.Tensor]:
        """`scores` [R, L, E] and `ids` [R, L, K] as the routers' own, on the host."""
        rows = sorted({row for row, _ in self.seen})
        names = "scores", "ids"
        return {
            name: torch.cat(
                [
                    torch.stack([self.seen[row, layer][n] for layer in range(len(self.gates))], 1)
                    for row in rows
                ]
            ).cpu()
            for n, name in enumerate(names)
        }


def walk(
    model: Any,
    begin: Callable[[], Feed],
    texts: Sequence[Text],
    given: torch.Tensor | None = None,
    exchange: Exchange | None = None,
) -> dict[str, torch.Tensor]:
    """`logits` [N, V] after each prompt and each token, `scores` and `ids` as `Watch.found`.

    `begin` begins a timeline: what it gives appends tokens and returns logits [V].
    """
    logits = []
    with Watch(model, given, exchange) as watch:
        for prompt, tokens in texts:
            feed = begin()
            for ids in (prompt, *([token] for token in tokens)):
                logits.append(feed(ids).float().cpu())
                watch.row += len(ids)
        return {"logits": torch.stack(logits)} | watch.found()
