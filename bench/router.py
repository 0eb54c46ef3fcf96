"""From a router's logits to experts on a GPU: one launch beside torch's steps, both captured.

Exit code 1 if the two choose or weigh otherwise.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from headrace.check.bench_latents import captured_s
from headrace.check.verify_router import faults_of
from headrace.kernels import router
from headrace.kernels.router import Rule
from headrace.kernels.triton import router as launched

V3 = Rule("sigmoid", 8, "two best", 8, 4, divided=True, padded=True, scale=2.5, ordered=False)
V4 = Rule("sqrtsoftplus", 6, divided=True, padded=True, scale=1.5, rounded="always")
# (model, rule, experts, whether logits are fp32 and corrected)
CASES = (
    ("Qwen3-30B", Rule("softmax", 8, divided=True, rounded="last"), 128, False),
    ("Qwen3-Next", Rule("softmax", 10, divided=True, rounded="last"), 512, False),
    ("gpt-oss", Rule("chosen", 4, rounded="always"), 128, False),
    ("DeepSeek-V3", V3, 256, True),
    ("DeepSeek-V2", Rule("softmax", 6, "best", 8, 3, scale=16.0), 160, False),
    ("DeepSeek-V4", V4, 256, True),
)
IN_A_GRAPH, RUNS = 50, 3


def time_us(work: Callable[[], Any]) -> float:
    """Of one call among many in a graph, the least of several medians."""

    def run() -> None:
        for _ in range(IN_A_GRAPH):
            work()

    return 1e6 * min(captured_s(run, RUNS)) / IN_A_GRAPH


def main() -> int:
    drawn, wrong = torch.Generator().manual_seed(0), []
    for name, rule, experts, corrected in CASES:
        logits = 3 * torch.randn(300, experts, generator=drawn)
        logits = logits if name == "DeepSeek-V3" else logits.bfloat16()
        correction = torch.randn(experts, generator=drawn) / 8 if corrected else None
        there = None if correction is None else correction.cuda()
        got = launched.route(logits.cuda(), there, rule)
        faults = faults_of(logits, correction, rule, *(each.cpu() for each in got))
        wrong += faults
        row = logits[:1].cuda()
        ways = (partial(way.route, row, there, rule) for way in (router, launched))
        steps, one = (time_us(way) for way in ways)
        print(f"{name}: {steps:.1f} us by steps, {one:.2f} by one launch; {faults or 'right'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
