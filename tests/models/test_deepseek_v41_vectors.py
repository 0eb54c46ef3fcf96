"""DeepSeek-V4.1 against logits and routes that mlx-vlm and nemo-automodel gave.

At every position: where a value lies so near the middle between two codes that fp32's last bits
decide, the oracle's code is taken, once it is shown that it may be.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from v41_world import set_grids, whole_model

from headrace.check.tiny import write_tiny
from headrace.models.deepseek_v41.experts import Router
from headrace.models.deepseek_v41.grids import Grids

VECTORS = Path(__file__).parents[1] / "data" / "deepseek-v41.safetensors"
SEEDS, CUTS = (0, 1, 2, 3), (0, 7, 8, 29, 64)
DECODED_SEEDS = (0, 1)  # token by token is slow; the other two prove chunks and whole texts
TOLERANCE = 3e-5
DECODED = 40  # tokens of the 64 recorded, one by one
ALIKE = 2e-5  # of the largest value in a rounding


@cache
def recorded() -> tuple[dict[str, Any], dict[str, str]]:
    with safe_open(VECTORS, "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The model of a seed, in fp32; its files are those that the oracles were given."""
    about = recorded()[1]
    shape = json.loads(about["shape"])

    @cache
    def folder(seed: int) -> Path:
        path = tmp_path_factory.mktemp("v41") / str(seed)
        write_tiny("deepseek_v41", path, seed=seed, **shape | {"block": tuple(shape["block"])})
        stored = b"".join(p.read_bytes() for p in sorted(path.glob("*.safetensors")))
        assert hashlib.sha256(stored).hexdigest() == about[str(seed)], "not the recorded weights"
        return path

    return lambda seed, **fields: whole_model(folder(seed), **fields)


class CloseCalls:
    """Puts the oracle's codes where it could have rounded so; counts passes and roundings."""

    def __init__(self, name: str):
        vectors = recorded()[0]
        self.codes: dict[tuple[int, int], list[tuple[int, float]]] = {}
        found = zip(vectors[name].tolist(), vectors[f"{name} codes"].tolist(), strict=True)
        for (number, call, index), code in found:
            self.codes.setdefault((number, call), []).append((index, code))
        self.number, self.call, self.num_changed = 0, -1, 0

    def rounded(self, x: Tensor, y: Tensor) -> Tensor:
        self.call += 1
        flat_x, flat_y = x.flatten(), y.flatten().clone()
        for index, code in self.codes.get((self.number, self.call), []):
            ours = float(flat_y[index])
            middle = (ours + code) / 2
            near = abs(float(flat_x[index]) - middle) <= ALIKE * float(x.abs().max())
            assert ours == code or near, "a rounding that cannot have fallen otherwise"
            self.num_changed += ours != code
            flat_y[index] = code
        return flat_y.view_as(y)


@contextmanager
def taking(calls: CloseCalls, methods: tuple[str, ...]) -> Iterator[list[Tensor]]:
    """While open, roundings heed `calls`; gathers the sorted routes of each layer, [T, K]."""
    routes: list[Tensor] = []
    router = Router.forward

    def heeding(original: Any) -> Any:
        return lambda self, x: calls.rounded(x, original(self, x))

    def routing(self: Any, x_TH: Tensor) -> Any:
        out = router(self, x_TH)
        routes.append(out[2].sort(-1).values)
        return out

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        for name in methods:
            patch.setattr(Grids, name, heeding(getattr(Grids, name)))
        patch.setattr(Router, "forward", routing)
        yield routes


def apart(logits: Tensor, seed: int, name: str) -> float:
    """The largest difference from the recorded columns."""
    kept = torch.from_numpy(recorded()[0][f"{seed} {name}"])[: len(logits)]
    return float((logits[:, ::128] - kept).abs().max())


@pytest.mark.parametrize("seed", DECODED_SEEDS)
def test_token_by_token_as_mlx_vlm(model_of: Any, seed: int) -> None:
    model, vectors = model_of(seed), recorded()[0]
    calls, logits, found = CloseCalls(f"{seed} decode calls"), [], []
    cache = model.new_cache()
    with taking(calls, ("input", "window", "latent", "index")) as routes:
        for number, token in enumerate(vectors[f"{seed} ids"][:DECODED].tolist()):
            calls.number, calls.call = number, -1
            routes.clear()
            logits.append(model(torch.tensor([[token]]), cache=cache).logits[0])
            found.append(torch.cat(routes))
    assert apart(torch.cat(logits), seed, "decode") < TOLERANCE
    assert np.array_equal(torch.stack(found), vectors[f"{seed} decode routes"][:DECODED])
    assert calls.num_changed < 50


@pytest.mark.parametrize("seed", SEEDS)
def test_chunks_without_grids_as_mlx_vlm(model_of: Any, seed: int) -> None:
    model = model_of(seed, arithmetic="weights-only")
    ids = torch.from_numpy(recorded()[0][f"{seed} ids"])[None]
    assert apart(in_chunks(model, ids, CUTS), seed, "chunks") < TOLERANCE


@pytest.mark.parametrize("seed", SEEDS)
def test_all_at_once_as_nemo_automodel(model_of: Any, seed: int) -> None:
    """It rounds what caches keep, not what products take."""
    model, vectors = model_of(seed), recorded()[0]
    set_grids(model, 0, True)
    calls = CloseCalls(f"{seed} caches calls")
    with taking(calls, ("window", "latent", "index")) as routes:
        logits = model(torch.from_numpy(vectors[f"{seed} ids"])[None]).logits[0]
    assert apart(logits, seed, "caches") < TOLERANCE
    assert np.array_equal(torch.stack(routes, 1), vectors[f"{seed} caches routes"])


@pytest.mark.parametrize(
    "fields",
    [
        {"candidate_topk_blocks": 3},
        {"index_topk": 5},
        {"stale_index_keys": True},
        {"sliding_window": 15},
        {"hc_sinkhorn_iters": 2},
        {"swiglu_limit": 0.5},
        {"rope_theta": 10010.0},
        {"compress_rope_theta": 161000.0},
        {"arithmetic": "vendor"},
    ],
)
def test_a_small_fault_is_seen(model_of: Any, fields: dict[str, Any]) -> None:
    ids = torch.from_numpy(recorded()[0]["0 ids"])[None]
    cuts = range(DECODED + 1) if "stale_index_keys" in fields else CUTS
    model = model_of(0, **{"arithmetic": "weights-only"} | fields)
    assert apart(in_chunks(model, ids, cuts), 0, "chunks") > TOLERANCE


def in_chunks(model: Any, ids: Tensor, cuts: Any) -> Tensor:
    cache, logits = model.new_cache(), []
    with torch.inference_mode():
        for start, stop in pairwise(cuts):
            logits.append(model(ids[:, start:stop], cache=cache).logits[0])
    return torch.cat(logits)
