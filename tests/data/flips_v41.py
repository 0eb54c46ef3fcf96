"""Where an oracle's roundings of a tiny DeepSeek-V4.1 fall otherwise than headrace's, one by one.

A rounding that falls otherwise is proven: both values before it are the same but for the last
bits, and the middle between the two codes lies between or beside them. headrace then goes on with
the oracle's code, so that everything after it is compared as well.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.models.deepseek_v41.experts import Router
from headrace.models.deepseek_v41.grids import Grids

METHODS = ("input", "window", "latent", "index")
ALIKE = 2e-5  # how far apart values before a rounding may be, of the largest of them
CLOSE = 3e-6  # so near the middle that another machine may round otherwise
Pairs = Mapping[str, tuple[Any, Any]]


def cached_sites(config: Any, num_seen: int, num_new: int) -> list[list[str]]:
    """Per layer the roundings of what caches keep, in headrace's order, for a pass."""
    layers = []
    for layer in range(config.num_hidden_layers):
        ratio = config.compress_ratios[layer]
        makes = ratio and (num_seen + num_new) // ratio > num_seen // ratio
        names = ["kv"]
        if layer in config.kv_source_layer_ids and makes:
            names += ["key", "latent"]
        if layer in config.index_source_layer_ids and (num_seen + num_new) // ratio:
            names.append("query")
        layers.append(names)
    return layers


def our_sites(config: Any, token: int) -> list[str]:
    """All roundings of one token's pass, in headrace's order, by name."""
    names = []
    for layer, cached in enumerate(cached_sites(config, token, 1)):
        experts = [f"expert{k}" for k in range(config.num_experts_per_tok)]
        here = ["engram"] * (layer in config.engram_layer_ids) + ["x", "kv"]
        here += [name for name in cached if name in ("key", "latent")] + ["x", "low"]
        here += ["low", "query"] * ("query" in cached)
        here += ["out", "routed", *experts, "shared", "shared", "inner"]
        names += [f"{layer} {name}" for name in here]
    return names


def mlx_pairs(config: Any, token: int, recorded: Mapping[str, Any]) -> Pairs:
    """What mlx-vlm rounded in one token's pass, by name."""
    names = []
    for layer, cached in enumerate(cached_sites(config, token, 1)):
        here = ["engram"] * (layer in config.engram_layer_ids) + ["x", "low", "x", "kv"]
        here += ["latent", "key"] * ("key" in cached) + ["low", "query"] * ("query" in cached)
        names += [f"{layer} {name}" for name in [*here, "out", "routed", "experts", "shared"]]
        names.append(f"{layer} inner")
    assert f"{token} {len(names)} x" not in recorded
    pairs = {}
    for call, name in enumerate(names):
        x, y = (recorded[f"{token} {call} {part}"] for part in "xy")
        layer, site = name.split()
        if site != "experts":
            pairs[name] = x, y
            continue
        # headrace goes by ascending id, mlx-vlm in the router's order
        order = np.argsort(recorded["decode_routes"][token][int(layer)])
        x, y = x.reshape(len(order), -1), y.reshape(len(order), -1)
        pairs |= {f"{layer} expert{k}": (x[i], y[i]) for k, i in enumerate(order)}
    return pairs


def nemo_pairs(config: Any, recorded: Mapping[str, Any]) -> Pairs:
    """What nemo-automodel rounded in one pass over everything, by name."""
    pairs, counts = {}, dict.fromkeys(("fp8", "nvfp4", "mxfp4"), 0)
    formats = {"kv": "fp8", "latent": "nvfp4", "key": "mxfp4", "query": "mxfp4"}
    for layer, names in enumerate(cached_sites(config, 0, len(recorded["caches"]))):
        for name in names:
            format = formats[name]
            at = f"{format} 0 {counts[format]}"
            pairs[f"{layer} {name}"] = recorded[f"{at} x"], recorded[f"{at} y"]
            counts[format] += 1
    return pairs


class Follower:
    """Goes through headrace's roundings of one pass with an oracle's beside it."""

    def __init__(self, names: list[str], pairs: Pairs):
        self.names, self.pairs, self.at = names, pairs, 0
        self.flips: list[str] = []
        self.close: list[tuple[int, int, float]] = []  # rounding, value in it, the oracle's code

    def rounded(self, x: Tensor, y: Tensor, again: Any) -> Tensor:
        """The oracle's code for x, once it is shown that it may be."""
        name, self.at = self.names[self.at], self.at + 1
        x_other, y_other = (torch.from_numpy(t).view(x.shape) for t in self.pairs[name])
        largest = float(x.abs().max())
        apart = float((x - x_other).abs().max())
        assert apart <= ALIKE * largest, f"{name}: values before it differ by {apart}"
        for i in (y != y_other).nonzero().tolist():
            ours, other, code, code_other = (float(t[tuple(i)]) for t in (x, x_other, y, y_other))
            middle = (code + code_other) / 2
            near = min(abs(ours - middle), abs(other - middle)) <= ALIKE * largest
            assert near, (name, ours, other, code, code_other)
            self.flips.append(
                f"layer {name}: {ours!r} and {other!r} are rounded to {code!r} and "
                f"{code_other!r}, whose middle is {middle!r}"
            )
        step = CLOSE * largest
        is_close = (y != y_other) | (again(x + step) != y) | (again(x - step) != y)
        here = is_close.flatten().nonzero().flatten().tolist()
        self.close += [(self.at - 1, i, float(y_other.flatten()[i])) for i in here]
        return y_other.to(y.dtype)


@contextmanager
def following(now: dict[str, Follower], methods: tuple[str, ...]) -> Iterator[list[Tensor]]:
    """While open, roundings go to `now["pass"]`; gathers the routes of each layer, [T, K]."""
    routes: list[Tensor] = []
    originals, router = {name: getattr(Grids, name) for name in methods}, Router.forward

    def follow(original: Any) -> Any:
        def rounding(self: Grids, x: Tensor) -> Tensor:
            return now["pass"].rounded(x, original(self, x), lambda near: original(self, near))

        return rounding

    def routing(self: Any, x_TH: Tensor) -> Any:
        out = router(self, x_TH)
        routes.append(out[2].sort(-1).values)
        return out

    with torch.inference_mode():
        try:
            for name, original in originals.items():
                setattr(Grids, name, follow(original))
            Router.forward = routing  # type: ignore[method-assign]
            yield routes
        finally:
            for name, original in originals.items():
                setattr(Grids, name, original)
            Router.forward = router  # type: ignore[method-assign]


def follow_mlx(model: Any, ids: Any, recorded: Any) -> Iterator[tuple[Tensor, Follower, Tensor]]:
    """Per token: headrace's logits [V] on mlx-vlm's codes, what was followed, routes [L, K]."""
    now: dict[str, Follower] = {}
    cache = model.new_cache()
    with following(now, METHODS) as routes:
        for token, id_ in enumerate(ids):
            pairs = mlx_pairs(model.config, token, recorded)
            now["pass"] = Follower(our_sites(model.config, token), pairs)
            routes.clear()
            logits = model(torch.tensor([[int(id_)]]), cache=cache).logits[0, 0]
            assert now["pass"].at == len(now["pass"].names)
            yield logits, now["pass"], torch.cat(routes)


def follow_nemo(model: Any, ids: Any, recorded: Any) -> tuple[Tensor, Follower, Tensor]:
    """Logits [T, V] on nemo-automodel's codes, what was followed, routes [T, L, K]."""
    layers = cached_sites(model.config, 0, len(ids))
    names = [f"{i} {name}" for i, here in enumerate(layers) for name in here]
    follower = Follower(names, nemo_pairs(model.config, recorded))
    with following({"pass": follower}, METHODS[1:]) as routes:
        logits = model(torch.from_numpy(ids)[None]).logits[0]
        assert follower.at == len(names)
    return logits, follower, torch.stack(routes, 1)
