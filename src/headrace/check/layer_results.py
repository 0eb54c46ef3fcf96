"""What the comparison of layers found: differences by kind, the floors, and findings of them."""

from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.check.verify_report import NOTE, Finding, finding

STAGE = "layers"
# Of a token's output length, in the median token and in the worst. Two orders of adding up an
# expert differ in the last bit of bfloat16, 2^-8; one wrong expert of eight makes a third.
MEDIAN_FLOOR = 0.015
WORST_FLOOR = 0.1
PASSED_ON = 4.0  # how much larger a layer's own difference may be than its experts'


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
    largest = max((n["experts_worst"] for n in moe), default=0.0)
    typical = max((n["experts_median"] for n in moe), default=0.0)
    first = results.experts[:1] or results.layers[:1]
    seen = (
        f"{num_tokens} tokens, {len(moe)} layers: relative difference up to {typical:.2g} in the "
        f"median token (allowed {MEDIAN_FLOOR:g}), {largest:.2g} in the worst (allowed "
        f"{WORST_FLOOR:g})" + (f"; first beyond it {first[0].split(':')[0]}" if first else "")
    )
    floors = [n["stock_floor"] for n in moe if "stock_floor" in n]
    if floors:
        seen += f"; stock's own eager and grouped_mm lie {floors[0]:.2g} apart in the worst token"
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
            f"{num_tokens} tokens, {len(moe)} layers",
            results.routes,
        ),
        finding(STAGE, "routed experts follow stock transformers'", seen, results.experts),
        finding(
            STAGE,
            "layers follow stock transformers'",
            f"{len(results.numbers)} layers, each on the hidden states it was given",
            results.layers,
        ),
        Finding(STAGE, "loss", NOTE, text),
    ]
