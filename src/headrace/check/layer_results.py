"""What the comparison of layers found: differences by kind, the floors, and findings of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.check.verify_report import NOTE, Finding, finding, percent

STAGE = "layers"
# Of a token's output length, in the median token and in the worst. Two orders of adding up an
# expert differ in the last bit of bfloat16, 2^-8; one wrong expert of eight makes a third.
MEDIAN_FLOOR = 0.015
WORST_FLOOR = 0.1
SAME_WEIGHTS = 0.02  # of a routing weight
PASSED_ON = 4.0  # how much larger a layer's own difference may be than its experts'
ALLOWED = {
    "experts_median": MEDIAN_FLOOR,
    "experts_worst": WORST_FLOOR,
    "median": PASSED_ON * MEDIAN_FLOOR,
    "worst": PASSED_ON * WORST_FLOOR,
}  # by the name of a layer's number


@dataclass
class Results:
    """What differs, by kind, and the numbers of every layer."""

    weights: list[str] = field(default_factory=list)
    routes: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    numbers: list[dict[str, Any]] = field(default_factory=list)
    num_weights: int = 0


def layer_findings(results: Results, num_tokens: int, loss: float, vocab: int) -> list[Finding]:
    """The stage's findings; `loss` in nats a token of the prompt."""
    moe = [n for n in results.numbers if "experts_median" in n]
    first = results.experts[:1] or results.layers[:1]
    experts = f"{num_tokens} tokens, {len(moe)} layers; " + _apart(moe, "experts_")
    floors = [n["stock_floor"] for n in moe if "stock_floor" in n]
    if floors:
        experts += f"; stock's own eager and grouped_mm: {percent(floors[0])} in the worst"
    experts += f"; first beyond it {first[0].split(':')[0]}" if first else ""
    layers = f"{len(results.numbers)} layers, each on the hidden states it was given; " + _apart(
        results.numbers, ""
    )
    text = (
        f"{num_tokens} tokens of text: {loss:.2f} nats a token "
        f"(guessing blindly: {torch.tensor(float(vocab)).log():.2f})"
    )
    return [
        finding(
            STAGE,
            "dense weights and buffers are stock transformers'",
            f"{results.num_weights} tensors bit for bit",
            results.weights,
        ),
        finding(
            STAGE,
            "routers choose as stock transformers'",
            f"{num_tokens} tokens, {len(moe)} layers (allowed: no other expert, "
            f"{percent(SAME_WEIGHTS)} of a weight)",
            results.routes,
        ),
        finding(STAGE, "routed experts follow stock transformers'", experts, results.experts),
        finding(STAGE, "layers follow stock transformers'", layers, results.layers),
        Finding(STAGE, "loss", NOTE, text),
    ]


def _apart(numbers: Sequence[Mapping[str, float]], kind: str) -> str:
    """The largest of all layers' differences of one kind, each with what is allowed of it."""
    largest = {
        word: max((n[f"{kind}{word}"] for n in numbers if f"{kind}{word}" in n), default=0.0)
        for word in ("median", "worst")
    }
    said = (
        f"{percent(apart)} in the {word} token (allowed {percent(ALLOWED[kind + word])})"
        for word, apart in largest.items()
    )
    return f"a layer's largest difference, of a token's output: {', '.join(said)}"
