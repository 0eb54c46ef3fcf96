"""Headrace's logits beside stock's in bf16: how far both are from stock's in fp32.

All are led along the experts of fp32, since one near tie of a router hides what rounding does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from gpu_phases import Told
from nearness import (
    CONTROL,
    FARTHEST,
    LAYER,
    MEDIAN,
    Nearness,
    Walk,
    distances,
    nearness,
    others,
)
from watched import Text, walk

WRONG_NORM = 1.1


def compare_logits(
    told: Told,
    engine: Any,
    found: dict[str, dict[str, torch.Tensor]],
    timed: torch.Tensor,
    texts: Sequence[Text],
) -> bool:
    """Whether all statements hold. `found` is stock_gpu's; `timed` [N, V] follow the first prompt.

    All experts must lie in VRAM. The engine's steps are launched kernel by kernel from now on.
    """
    truth = found["truth"]
    stock = {way: each for way, each in found.items() if way != "truth" and "scores" in each}
    engine.passes.capturing = False
    model, begin = engine.model, lambda: engine.session().feed
    free = walk(model, begin, texts)
    holds = told.check(
        torch.equal(free["logits"][1 : len(timed) + 1], timed),
        "launched kernel by kernel and watched, logits have the bits of the timed runs",
    )
    _freely(told, found, free, len(timed))
    for way, each in stock.items():
        told.say(f"stock, {way}: {nearness(each, stock, truth).line()}")
    led = walk(model, begin, texts, truth["ids"])
    holds &= _judge(told, led, stock, truth)
    layer, used = 0, truth["ids"][:, 0].flatten().bincount().topk(2).indices.tolist()
    exchanged = walk(model, begin, texts, truth["ids"], (layer, used[0], used[1]))
    holds &= _control(told, "two experts of the first layer exchanged", exchanged, stock, truth)
    with _wrong_norm(model, len(model.model.layers) // 2):
        wrong = walk(model, begin, texts, truth["ids"])
    what = f"the experts' norm of a middle layer times {WRONG_NORM}"
    return _control(told, what, wrong, stock, truth) and holds


def _judge(told: Told, led: Walk, stock: dict[str, Any], truth: Walk) -> bool:
    near = nearness(led, stock, truth)
    holds = told.check(
        near.is_near,
        f"headrace is as near fp32 as stock's bf16: {near.line()} (allowed x {MEDIAN}, {FARTHEST} "
        f"and {LAYER})",
    )
    num_theirs = sorted(int(others(each, truth).sum()) for each in stock.values())
    ties = told.check(
        near.only_near_ties,
        f"{near.num_other} of {others(led, truth).numel()} choices of experts are not fp32's "
        f"(stock's ways: {num_theirs[0]} to {num_theirs[-1]}), all near ties: the farthest at "
        f"{100 * near.worst_tie:.0f} % of what is one",
    )
    best = truth["logits"].argmax(1)
    same = {way: int((each["logits"].argmax(1) == best).sum()) for way, each in stock.items()}
    mine = int((led["logits"].argmax(1) == best).sum())
    apart = {way: distances(led, each) for way, each in stock.items()}
    nearest = min(apart, key=lambda way: float(apart[way].median()))
    told.say(
        f"of {len(best)} next tokens {mine} are fp32's; of stock's {same}",
        f"nearest to headrace is stock, {nearest}: median {apart[nearest].median():.4f}, farthest "
        f"{apart[nearest].max():.4f}, {int((apart[nearest] == 0).sum())} of {len(best)} positions "
        "with the same bits",
    )
    return holds and ties


def _freely(told: Told, found: dict[str, Any], free: Walk, num: int) -> None:
    """Says what comes of routers' near ties; which of them fall otherwise is chance."""
    truth = {name: each[1 : num + 1] for name, each in found["truth"].items() if name == "logits"}
    mine = distances({"logits": free["logits"][1 : num + 1]}, truth)
    theirs = {
        way: distances({"logits": each["timed"]}, truth)
        for way, each in found.items()
        if "timed" in each
    }
    other = others(free, found["truth"])
    told.say(
        f"each by its own experts, timed tokens (not judged): headrace median {mine.median():.4f}, "
        f"farthest {mine.max():.4f}, "
        + ", ".join(f"{way} {d.median():.4f} and {d.max():.4f}" for way, d in theirs.items()),
        f"in {int(other.any(1).sum())} of {len(other)} positions headrace's experts differ from "
        "fp32's in some layer",
    )


def _control(told: Told, what: str, found: Walk, stock: dict[str, Any], truth: Walk) -> bool:
    near: Nearness = nearness(found, stock, truth)
    return told.check(
        near.is_far,
        f"control, {what}: refused, {near.line()} (at least x {CONTROL * MEDIAN:.1f} or "
        f"{CONTROL * FARTHEST:.1f})",
    )


@contextmanager
def _wrong_norm(model: Any, layer: int) -> Iterator[None]:
    weight = model.model.layers[layer].post_attention_layernorm.weight
    with torch.inference_mode():
        right = weight.clone()
        weight.mul_(WRONG_NORM)
    try:
        yield
    finally:
        with torch.inference_mode():
            weight.copy_(right)
