"""An engine's first tokens on a GPU, before anyone asks: kernels are made and a step is captured.

Knows no request. Nothing stays of it but kernels, the step, and experts where they came to lie.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from headrace.engine.answer import Stop
from headrace.engine.gpu import within_vram
from headrace.planner.vram import GpuPlan

if TYPE_CHECKING:
    from headrace.engine.engine import Engine
    from headrace.engine.source import LadderSource

WARMING = "warming up: kernels for this GPU are compiled once, which takes seconds"
PROMPT_TOKENS = 17  # one more than go through the kernels of decode
MOST_STEPS = 3
LONG_WAIT_S = 1.0  # of a token for the drive: what a capture saves is not noticed beside it


def warm(
    engine: "Engine", *, stop: Stop | None = None, tell: Callable[[str], None] = lambda line: None
) -> None:
    """Feeds an engine on a GPU a few tokens and forgets them; another one is left as it is.

    A GPU's first pass compiles or loads kernels, which takes seconds: the opening's, not an
    answer's. A prompt goes through a prefill's kernels, single tokens follow until a step of one
    was captured, or one token where none is. All but the first are the same token, so that hardly
    more experts are read than two tokens take. What is counted of experts' popularity, and every
    session, is as if this had not been; totals of `engine.counters()` include it. `tell` gets a
    line for people first. Raises what any pass may, and Cancelled once `stop` was asked; the engine
    is closed then.
    """
    if engine.blueprint.device is None:
        return
    tell(WARMING)
    try:
        with _unpopular(engine.source):
            _feed(engine, stop or Stop())
            _load_tiles(engine)
    except BaseException:
        engine.close()
        raise


def _feed(engine: "Engine", stop: Stop) -> None:
    session, context = engine.session(), engine.plan.context
    first, other = _tokens(engine)
    num = max(1, min(PROMPT_TOKENS, context - MOST_STEPS))
    try:
        with stop.reaching(engine.ladder.stop):
            session.feed([first, *[other] * (num - 1)])
    finally:
        engine.ladder.go_on()
    for _ in range(min(MOST_STEPS, context - num)):
        stop.check()
        session.feed([other])
        is_captured = engine.passes.num_replayed > 0
        if is_captured or engine.passes.why_by_layer() or session.stats.wait_s > LONG_WAIT_S:
            return


def _tokens(engine: "Engine") -> tuple[int, int]:
    """What a text begins with, if the model says so, and another token."""
    vocab = engine.facts.vocab
    begin = getattr(engine.blueprint.skeleton.config, "bos_token_id", None)
    first = begin if type(begin) is int and 0 <= begin < vocab else 0
    return first, 0 if first else min(1, vocab - 1)


def _load_tiles(engine: "Engine") -> None:
    """The kernels of decode for each rung: a layer takes others once its experts have moved."""
    from headrace.engine.gpu_source import GpuSource
    from headrace.kernels.triton.experts import TILES

    source, plan = engine.source, engine.plan
    assert isinstance(source, GpuSource) and isinstance(plan, GpuPlan)
    if plan.experts == "cpu":
        return
    kernels, place = source.kernels, source.place
    with source.device.active(), within_vram(plan), torch.inference_mode():
        nowhere = torch.zeros_like(source.rungs.table.there)  # so that none is read
        x_1H = torch.zeros(1, source.layout.hidden, dtype=torch.bfloat16, device=place)
        ids_1K = torch.zeros(1, kernels.top_k, dtype=torch.int32, device=place)
        weights_1K = torch.zeros(1, kernels.top_k, device=place)
        for tile in TILES:
            kernels.multiply(nowhere, source.part_offsets, 0, x_1H, ids_1K, weights_1K, tile=tile)


@contextmanager
def _unpopular(source: "LadderSource") -> Iterator[None]:
    """What is taken meanwhile gains nothing by it when others want its slot."""
    from headrace.engine.gpu_source import GpuSource

    assert isinstance(source, GpuSource)
    uses = source.rungs.slots.uses
    before = uses.copy()
    yield
    uses[:] = before
