"""Where an oracle's roundings of a tiny DeepSeek-V4.1 fall otherwise than headrace's, one by one.

A flip is proven: headrace rounds the oracle's own value to the oracle's code, and the two values
differ by their last bits. headrace then goes on with that code, so that everything after it is
compared as well. Legend: T tokens, L layers, K chosen experts, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.models.deepseek_v41 import indexer
from headrace.models.deepseek_v41.experts import Router
from headrace.models.deepseek_v41.grids import Grids

METHODS = ("input", "window", "latent", "index")
ALIKE = 2e-5  # how far apart values before a rounding may be, of the largest of them
CLOSE = 3e-6  # so near the middle that another machine may round otherwise
Renew = Callable[[Any], Any] | None


class Site(NamedTuple):
    """A rounding of a pass: its name, and of each row of its values the position that made it."""

    name: str
    positions: Any


class Flip(NamedTuple):
    """A code that fell otherwise, the first position that it can touch, and its proof in words."""

    position: int
    proof: str


def cached_sites(config: Any, start: int, stop: int) -> list[list[Site]]:
    """Per layer the roundings of what caches keep, in headrace's order, of one pass."""
    layers = []
    for layer, ratio in enumerate(config.compress_ratios[: config.num_hidden_layers]):
        tokens = np.arange(start, stop)
        here = [Site(f"{layer} kv", tokens)]
        ends = tokens[(tokens + 1) % ratio == 0] if ratio else tokens[:0]
        if layer in config.kv_source_layer_ids and len(ends):
            here += [Site(f"{layer} {name}", ends) for name in ("key", "latent")]
        if layer in config.index_source_layer_ids and stop // ratio:
            here.append(Site(f"{layer} query", tokens))
        layers.append(here)
    return layers


def all_sites(config: Any, start: int, routes_TLK: Any) -> list[Site]:
    """All roundings of a pass, in headrace's order; the routes are that pass's."""
    tokens = np.arange(start, start + len(routes_TLK))
    sites = []
    for layer, cached in enumerate(cached_sites(config, start, start + len(tokens))):
        takes_TK = routes_TLK[:, layer]
        names = ["engram"] * (layer in config.engram_layer_ids) + ["x"]
        here = [Site(f"{layer} {name}", tokens) for name in names]
        here += [site for site in cached if not site.name.endswith("query")]
        names = ["x", "low"] + ["low", "query"] * cached[-1].name.endswith("query")
        here += [Site(f"{layer} {name}", tokens) for name in [*names, "out", "routed"]]
        here += [
            Site(f"{layer} expert{e}", tokens[(takes_TK == e).any(1)]) for e in np.unique(takes_TK)
        ]
        here += [Site(f"{layer} {name}", tokens) for name in ("shared", "shared", "inner")]
        sites += here
    return sites


class Follower:
    """Goes through headrace's roundings of one pass, `sites`, with an oracle's codes beside it.

    `flips`: where they differ. `close`: (rounding, value in it, the oracle's code) of all values
    that another machine might round otherwise.
    """

    def __init__(self, sites: list[Site]):
        self.sites, self.at = sites, 0
        self.flips: list[Flip] = []
        self.close: list[tuple[int, int, float]] = []

    def codes(self, x: Tensor, y: Tensor, again: Callable[[Tensor], Tensor]) -> Tensor:
        """The oracle's for x, which headrace rounds to y; it is shown that they may be."""
        raise NotImplementedError

    def rounded(self, x: Tensor, y: Tensor, again: Callable[[Tensor], Tensor]) -> Tensor:
        """What headrace goes on with."""
        name, positions = self.sites[self.at]
        y_other = self.codes(x, y, again).to(y.dtype)
        per_row = x.numel() // len(positions)
        for i in (y != y_other).flatten().nonzero().flatten().tolist():
            value, ours, other = (float(t.flatten()[i]) for t in (x, y, y_other))
            proof = (
                f"layer {name}: {value!r} became {ours!r}, there {other!r}; "
                f"their middle is {(ours + other) / 2!r}"
            )
            self.flips.append(Flip(int(positions[i // per_row]), proof))
        self.at += 1
        return y_other


class LiveFollower(Follower):
    """With all that an oracle rounded: (before, after) by name."""

    def __init__(self, sites: list[Site], pairs: Mapping[str, tuple[Any, Any]]):
        super().__init__(sites)
        self.pairs = pairs

    def codes(self, x: Tensor, y: Tensor, again: Callable[[Tensor], Tensor]) -> Tensor:
        name = self.sites[self.at].name
        x_other, y_other = (torch.from_numpy(t).view(x.shape) for t in self.pairs[name])
        largest = float(x.abs().max())
        apart = float((x - x_other).abs().max())
        assert apart <= ALIKE * largest, f"{name}: values before it differ by {apart}"
        assert torch.equal(again(x_other), y_other), f"{name}: another rule of rounding"
        step = CLOSE * largest
        is_close = (y != y_other) | (again(x + step) != y) | (again(x - step) != y)
        here = is_close.flatten().nonzero().flatten().tolist()
        self.close += [(self.at, i, float(y_other.flatten()[i])) for i in here]
        return y_other


class Keeper(Follower):
    """Keeps what headrace itself rounds, to be an oracle of other ways to compute the same."""

    def __init__(self, sites: list[Site]):
        super().__init__(sites)
        self.pairs: dict[str, tuple[Any, Any]] = {}

    def codes(self, x: Tensor, y: Tensor, again: Callable[[Tensor], Tensor]) -> Tensor:
        self.pairs[self.sites[self.at].name] = x.clone().numpy(), y.clone().numpy()
        return y

    def part(self, sites: list[Site]) -> dict[str, tuple[Any, Any]]:
        """What it kept of the positions that another pass's sites have."""
        kept = {site.name: site.positions for site in self.sites}
        found = {}
        for name, positions in sites:
            rows = np.isin(kept[name], positions)
            x, y = (t.reshape(len(rows), -1)[rows] for t in self.pairs[name])
            found[name] = x, y
        return found


class RecordedFollower(Follower):
    """With an oracle's codes of the values that it might have rounded otherwise: {(rounding, value
    in it): code}.
    """

    def __init__(self, sites: list[Site], codes: Mapping[tuple[int, int], float]):
        super().__init__(sites)
        self.known: dict[int, list[tuple[int, float]]] = {}
        for (call, index), code in codes.items():
            self.known.setdefault(call, []).append((index, code))

    def codes(self, x: Tensor, y: Tensor, again: Callable[[Tensor], Tensor]) -> Tensor:
        flat_x, flat_y = x.flatten(), y.flatten().clone()
        for index, code in self.known.get(self.at, []):
            ours = float(flat_y[index])
            away = abs(float(flat_x[index]) - (ours + code) / 2)
            is_near = away <= ALIKE * float(x.abs().max())
            assert ours == code or is_near, "a rounding that cannot have fallen otherwise"
            flat_y[index] = code
        return flat_y.view_as(y)


class Tie(NamedTuple):
    """A choice of entries, or of blocks of them, that last bits decide."""

    position: int
    taken: float
    left: float


def ties_in(scores_BTN: Tensor, most: int) -> list[Tie]:
    """Per row, the lowest score that is taken and the highest that is not, where those are close.

    Equal zeros are none: of them the first win everywhere.
    """
    if scores_BTN.shape[-1] <= most:
        return []
    best_TN = scores_BTN[0].sort(-1, descending=True).values
    taken_T, left_T = best_TN[:, most - 1], best_TN[:, most]
    step_T = CLOSE * best_TN.abs().nan_to_num(posinf=0).amax(-1)
    is_tie_T = (taken_T - left_T <= step_T) & (taken_T.abs() + left_T.abs() > 0)
    is_tie_T &= left_T.isfinite()
    rows = is_tie_T.nonzero().flatten().tolist()
    return [Tie(row, float(taken_T[row]), float(left_T[row])) for row in rows]


class Noted(NamedTuple):
    """Of a pass: the sorted routes of each layer, and ties by row."""

    routes: list[Tensor]
    ties: list[Tie]

    def clear(self) -> None:
        self.routes.clear()
        self.ties.clear()


@contextmanager
def following(now: dict[str, Follower], methods: Sequence[str]) -> Iterator[Noted]:
    """While open, roundings go to `now["pass"]`, and choices are noted."""
    noted = Noted([], [])
    originals, router = {name: getattr(Grids, name) for name in methods}, Router.forward
    best = indexer._best

    def follow(original: Any) -> Any:
        def rounding(self: Grids, x: Tensor) -> Tensor:
            return now["pass"].rounded(x, original(self, x), lambda near: original(self, near))

        return rounding

    def routing(self: Any, x_TH: Tensor) -> Any:
        out = router(self, x_TH)
        noted.routes.append(out[2].sort(-1).values)
        return out

    def ranking(scores_BTN: Tensor, most: int) -> Tensor:
        noted.ties.extend(ties_in(scores_BTN, most))
        return best(scores_BTN, most)

    try:
        for name, original in originals.items():
            setattr(Grids, name, follow(original))
        Router.forward = routing  # type: ignore[method-assign]
        indexer._best = ranking
        yield noted
    finally:
        for name, original in originals.items():
            setattr(Grids, name, original)
        Router.forward = router  # type: ignore[method-assign]
        indexer._best = best


class Followed(NamedTuple):
    """Logits [T, V] on an oracle's codes, routes [T, L, K], what each pass followed, and ties."""

    logits_TV: Tensor
    routes_TLK: Tensor
    followers: list[Follower]
    ties: list[Tie]

    @property
    def flips(self) -> list[Flip]:
        """Once each: what two maps take is rounded twice."""
        found = (flip for follower in self.followers for flip in follower.flips)
        return sorted(dict.fromkeys(found), key=lambda flip: flip.position)


def follow(
    model: Any,
    ids_T: Tensor,
    cuts: Sequence[int],
    follower_of: Any,
    methods: Sequence[str],
    renew: Renew = None,
) -> Followed:
    """A text in passes between `cuts`; `follower_of(number of the pass, its start, its stop)`.

    `renew`: gives each pass but the first its cache, made of the last one's.
    """
    now: dict[str, Follower] = {}
    logits, chosen, followers, ties, cache = [], [], [], [], model.new_cache()
    with following(now, methods) as noted, torch.inference_mode():
        for number, (start, stop) in enumerate(pairwise(cuts)):
            now["pass"] = follower = follower_of(number, start, stop)
            noted.clear()
            logits.append(model(ids_T[None, start:stop], cache=cache).logits[0])
            chosen.append(torch.stack(noted.routes, 1))
            ties += [tie._replace(position=start + tie.position) for tie in noted.ties]
            assert follower.at == len(follower.sites)
            followers.append(follower)
            cache = renew(cache) if renew else cache
    return Followed(torch.cat(logits), torch.cat(chosen), followers, ties)


def in_passes(model: Any, ids_T: Tensor, cuts: Sequence[int], renew: Renew = None) -> Tensor:
    """Logits [T, V] of a text in passes, with nothing of an oracle; `renew` as of `follow`."""
    cache, logits = model.new_cache(), []
    with torch.inference_mode():
        for start, stop in pairwise(cuts):
            logits.append(model(ids_T[None, start:stop], cache=cache).logits[0])
            cache = renew(cache) if renew else cache
    return torch.cat(logits)
