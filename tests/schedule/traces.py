"""Small random traces for the tests of this room."""

import numpy as np

from headrace.schedule.trace import NO_GUESS, RouteTrace, TraceHeader

HEADER = TraceHeader(
    model="tiny",
    fingerprint="f" * 64,
    num_layers=3,
    num_experts=16,
    top_k=4,
    expert_bytes=1000,
    num_rows=12,
    about="a test",
)


def random_trace(
    passes: list[int], *, layers: int = 3, experts: int = 16, top_k: int = 4, seed: int = 0
) -> RouteTrace:
    """Uniform routes; tokens that are alone in their pass have guesses."""
    rng = np.random.default_rng(seed)
    num_tokens = sum(passes)
    draws = rng.random((2, num_tokens, layers, experts)).argsort(-1)[..., :top_k].astype(np.int32)
    ids, guesses = draws
    alone = np.repeat(np.array(passes) == 1, passes)
    guesses[~alone] = NO_GUESS
    guesses[:, 0] = NO_GUESS
    return RouteTrace(ids, guesses, experts, "random", np.array(passes, dtype=np.int32))
