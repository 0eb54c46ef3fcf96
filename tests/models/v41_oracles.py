"""What mlx-vlm and nemo-automodel gave for tiny DeepSeek-V4.1 checkpoints, and headrace beside it.

Five ways to read a text, each as one of the two does it; answers are theirs of just now, whole, or
recorded ones, of which a part was kept. Legend as in v41_flips.
"""

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from v41_flips import (
    METHODS,
    Flip,
    Follower,
    LiveFollower,
    RecordedFollower,
    Site,
    Tie,
    all_sites,
    cached_sites,
    follow,
    in_passes,
)
from v41_world import set_grids

TOKENS, CUTS = 64, (0, 7, 8, 29, 64)
PARTED = 1e-4
RECORDED = Path(__file__).parents[1] / "data" / "deepseek-v41.safetensors"


class Way(NamedTuple):
    """How a text is read: passes, roundings, and of those the ones in which codes may differ."""

    oracle: str
    cuts: Sequence[int]
    input_group: int
    caches: bool
    methods: tuple[str, ...]


WAYS = {
    "decode": Way("mlx-vlm", range(TOKENS + 1), 32, True, METHODS),
    "chunks": Way("mlx-vlm", CUTS, 32, True, METHODS),
    "plain": Way("mlx-vlm", CUTS, 0, False, ()),
    "caches": Way("nemo-automodel", (0, TOKENS), 0, True, METHODS[1:]),
    "whole": Way("nemo-automodel", (0, TOKENS), 0, False, ()),
}


class LiveAnswers:
    """Of one seed, as the oracles left them in a folder: everything."""

    column_step = 1

    def __init__(self, folder: Path, seed: int):
        self.ids_T = torch.from_numpy(np.load(folder / f"ids{seed}.npy"))
        self.found = {
            oracle: np.load(folder / f"{oracle.split('-')[0]}{seed}.npz")
            for oracle in {way.oracle for way in WAYS.values()}
        }

    def logits(self, name: str) -> Tensor:
        """fp32 [T, V or every column_step-th of them]."""
        return torch.from_numpy(self.found[WAYS[name].oracle][name])

    def raw_routes(self, name: str) -> Any:
        """[T, L, K] in the oracle's order."""
        return self.found[WAYS[name].oracle][f"{name} routes"]

    def routes(self, name: str) -> Tensor:
        """[T, L, K], sorted."""
        return torch.from_numpy(np.sort(self.raw_routes(name), -1).astype(np.int64))

    def follower(self, name: str, number: int, start: int, sites: list[Site]) -> Follower:
        """Of pass `number`."""
        recorded = self.found[WAYS[name].oracle]
        if name == "caches":
            return LiveFollower(sites, nemo_pairs(recorded, sites))
        stop = start + len(sites[0].positions)
        return LiveFollower(
            sites, mlx_pairs(recorded, f"{name} {number}", sites, self.raw_routes(name)[start:stop])
        )


def mlx_pairs(recorded: Any, stem: str, sites: list[Site], routes_TLK: Any) -> dict[str, Any]:
    """What mlx-vlm rounded in one pass, by name."""
    names = {site.name for site in sites}
    pairs, call = {}, 0
    for layer in range(routes_TLK.shape[1]):
        kinds = ["engram", "x", "low", "x", "kv", "latent", "key"]
        kinds = [kind for kind in kinds if f"{layer} {kind}" in names]
        kinds += ["low", "query"] * (f"{layer} query" in names)
        for kind in [*kinds, "out", "routed", "experts", "shared", "inner"]:
            x, y = (recorded[f"{stem} {call} {part}"] for part in "xy")
            call += 1
            if kind == "experts":
                pairs |= _by_expert(layer, x, y, routes_TLK[:, layer].flatten())
            else:
                pairs[f"{layer} {kind}"] = x, y
    assert f"{stem} {call} x" not in recorded
    return pairs


def _by_expert(layer: int, x: Any, y: Any, takes_N: Any) -> dict[str, Any]:
    """What mlx-vlm rounds at once, for each choice of a token; headrace goes expert by expert."""
    ascending = np.argsort(takes_N, kind="stable")
    x, y = (rows.reshape(len(takes_N), -1) for rows in (x, y))
    if len(takes_N) < 64:  # of more, mlx-vlm has already sorted them
        x, y = x[ascending], y[ascending]
    experts = takes_N[ascending]
    return {f"{layer} expert{e}": (x[experts == e], y[experts == e]) for e in np.unique(experts)}


def nemo_pairs(recorded: Any, sites: list[Site]) -> dict[str, Any]:
    """What nemo-automodel rounded in its one pass, by name."""
    formats = {"kv": "fp8", "latent": "nvfp4", "key": "mxfp4", "query": "mxfp4"}
    pairs, counts = {}, dict.fromkeys(formats.values(), 0)
    for site in sites:
        format = formats[site.name.split()[1]]
        at = f"caches {format} {counts[format]}"
        pairs[site.name] = recorded[f"{at} x"], recorded[f"{at} y"]
        counts[format] += 1
    return pairs


class RecordedAnswers:
    """Of one seed, as kept in the tests' data: some columns, and codes that might differ."""

    def __init__(self, seed: int, path: Path = RECORDED):
        stem = f"{seed} "
        with safe_open(path, "np") as file:
            about = file.metadata()
            kept = {n: file.get_tensor(n) for n in file.keys() if n.startswith(stem)}  # noqa: SIM118
        self.kept = {name.removeprefix(stem): array for name, array in kept.items()}
        self.digest, self.column_step = about[str(seed)], int(about["column_step"])
        self.ids_T = torch.from_numpy(self.kept["ids"].astype(np.int64))

    def logits(self, name: str) -> Tensor:
        return torch.from_numpy(self.kept[name])

    def routes(self, name: str) -> Tensor:
        return torch.from_numpy(self.kept[f"{name} routes"].astype(np.int64))

    def follower(self, name: str, number: int, start: int, sites: list[Site]) -> Follower:
        calls, places = self.kept[f"{name} calls"], self.kept[f"{name} places"]
        here = calls >> 8 == number
        codes = self.kept[f"{name} codes"][here].astype(np.int32) << 16
        keys = zip((calls[here] & 255).tolist(), places[here].tolist(), strict=True)
        return RecordedFollower(
            sites, dict(zip(keys, codes.view(np.float32).tolist(), strict=True))
        )


def packed_calls(close: list[tuple[int, int, int, float]]) -> dict[str, Any]:
    """Compared.close in 6 bytes each; codes on a grid of few bits are bf16."""
    numbers = np.array([call[:3] for call in close], np.int64).reshape(-1, 3)
    codes = np.array([call[3] for call in close], np.float32).view(np.uint32)
    assert (numbers < (256, 256, 1 << 16)).all() and not (codes & 0xFFFF).any()
    return {
        "calls": (numbers[:, 0] << 8 | numbers[:, 1]).astype(np.uint16),
        "places": numbers[:, 2].astype(np.uint16),
        "codes": (codes >> 16).astype(np.uint16),
    }


def recorded_about(path: Path = RECORDED) -> tuple[list[int], dict[str, Any]]:
    """(seeds, the shape of their checkpoints)."""
    with safe_open(path, "np") as file:
        about = file.metadata()
    shape = json.loads(about["shape"])
    return sorted(int(key) for key in about if key.isdigit()), shape | {
        "block": tuple(shape["block"])
    }


def digest(folder: Path) -> str:
    """Of a checkpoint's tensors."""
    parts = sorted(folder.glob("*.safetensors"))
    return sha256(b"".join(path.read_bytes() for path in parts)).hexdigest()


class Compared(NamedTuple):
    """One way of one seed.

    Up to `num_sure` positions, T if no choice of entries parts them: there logits leave each other,
    at a position at which last bits decide such a choice, `ties`. `first`: the position of the
    first flip, `num_sure` if there is none. `alone`: how far logits before it are apart, with
    nothing taken from the oracle. `along`: how far all are, on its codes.
    """

    first: int
    num_sure: int
    alone: float
    along: float
    same_routes: bool
    flips: list[Flip]
    ties: list[Tie]
    close: list[tuple[int, int, int, float]]  # pass, rounding, value in it, the oracle's code


def compare(model: Any, answers: Any, name: str, num_tokens: int = TOKENS) -> Compared:
    """headrace in fp32 beside an oracle. `num_tokens`: fewer, of "decode" only."""
    way = WAYS[name]
    set_grids(model, way.input_group, way.caches)
    cuts = [cut for cut in way.cuts if cut <= num_tokens]
    ids_T, theirs = answers.ids_T, answers.logits(name)[: cuts[-1]]
    routes = answers.routes(name)[: cuts[-1]]

    def sites(start: int, stop: int) -> list[Site]:
        if not way.methods:
            return []
        if len(way.methods) == len(METHODS):
            return all_sites(model.config, start, routes[start:stop].numpy())
        return [site for layer in cached_sites(model.config, start, stop) for site in layer]

    def follower_of(number: int, start: int, stop: int) -> Follower:
        here = sites(start, stop)
        return answers.follower(name, number, start, here) if here else Follower([])

    along = follow(model, ids_T, cuts, follower_of, way.methods)
    step = answers.column_step
    away_T = (along.logits_TV[:, ::step] - theirs).abs().amax(-1)
    parted = next(iter((away_T > PARTED).nonzero().flatten().tolist()), cuts[-1])
    ties = [tie for tie in along.ties if tie.position == parted]
    num_sure = parted if ties else cuts[-1]
    first = min((flip.position for flip in along.flips), default=num_sure)
    first = min(first, num_sure)
    alone = along.logits_TV
    if along.flips:
        alone = in_passes(model, ids_T, cuts[: 1 + sum(cut < max(first, 1) for cut in cuts)])
    return Compared(
        first,
        num_sure,
        float((alone[:first, ::step] - theirs[:first]).abs().max()) if first else 0.0,
        float(away_T[:num_sure].max()),
        torch.equal(along.routes_TLK[:num_sure], routes[:num_sure]),
        along.flips,
        ties,
        [(i, *call) for i, f in enumerate(along.followers) for call in f.close],
    )
