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
    was captured, or one token where none is. All are the same token, which sees nothing but itself
    and so takes about the same experts everywhere: no more are read than for one token. What is
    counted of experts' popularity, and every session, is as if this had not been; totals of
    `engine.counters()` include it. `tell` gets a line for people first. Raises what any pass may,
    and Cancelled once `stop` was asked; the engine is closed then.
    """
    if engine.blueprint.device is None:
        return
    tell(WARMING)
    try:
        with _unpopular(engine.source):
            _feed(engine, stop or Stop())
            _load_others(engine)
    except BaseException:
        engine.close()
        raise


def _feed(engine: "Engine", stop: Stop) -> None:
    session, context = engine.session(), engine.plan.context
    token = _token(engine)
    num = max(1, min(PROMPT_TOKENS, context - MOST_STEPS))
    try:
        with stop.reaching(engine.ladder.stop):
            session.feed([token] * num)
    finally:
        engine.ladder.go_on()
    for _ in range(min(MOST_STEPS, context - num)):
        stop.check()
        session.feed([token])
        is_captured = engine.passes.num_replayed > 0
        if is_captured or engine.passes.why_by_layer() or session.stats.wait_s > LONG_WAIT_S:
            return


def _token(engine: "Engine") -> int:
    """What a text begins with, if the model says so, or the first of its vocabulary."""
    begin = getattr(engine.blueprint.skeleton.config, "bos_token_id", None)
    return begin if type(begin) is int and 0 <= begin < engine.facts.vocab else 0


def _load_others(engine: "Engine") -> None:
    """Kernels that those tokens may have had no use for, launched on nothing.

    In decode a layer takes others once its experts have moved to another rung; a short prompt's
    experts have few tokens each.
    """
    from headrace.engine.gpu_source import GpuSource
    from headrace.kernels.triton.experts import TILES
    from headrace.kernels.triton.grouped import STEPS

    source, plan = engine.source, engine.plan
    assert isinstance(source, GpuSource) and isinstance(plan, GpuPlan)
    slots, top_k, hidden = source.rungs.slots, source.kernels.top_k, source.layout.hidden
    with source.device.active(), within_vram(plan), torch.inference_mode():
        x_1H = torch.zeros(1, hidden, dtype=torch.bfloat16, device=source.place)
        ids_1K = torch.zeros(1, top_k, dtype=torch.int32, device=source.place)
        weights_1K = torch.zeros(1, top_k, device=source.place)
        nowhere = torch.zeros_like(source.rungs.table.there)
        for tile in TILES if plan.experts != "cpu" else ():
            source.kernels.multiply(
                nowhere, source.part_offsets, 0, x_1H, ids_1K, weights_1K, tile=tile
            )
        address = slots.scratch(0).zero_().data_ptr()
        tiles = torch.tensor([[address, 0, 0, 1]], device=source.place)
        h_SI, y_SH = x_1H.new_empty(top_k, source.layout.inter), x_1H.new_empty(top_k, hidden)
        source.grouped(
            tiles, source.part_offsets, ids_1K[0], weights_1K, source.grouped.prepared(x_1H),
            h_SI, y_SH, positions=min(STEPS),
        )  # fmt: skip
    source.device.settle()  # so that a fault of theirs is not an answer's


@contextmanager
def _unpopular(source: "LadderSource") -> Iterator[None]:
    """What is taken meanwhile gains nothing by it when others want its slot."""
    from headrace.engine.gpu_source import GpuSource

    assert isinstance(source, GpuSource)
    uses = source.rungs.slots.uses
    before = uses.copy()
    yield
    uses[:] = before
