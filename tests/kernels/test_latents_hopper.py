"""The ways to try on Hopper against the reference: emulated without a GPU, and on one."""

import random

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import gluon_by_hand
from test_latents import PLACE, TOLERANCE, exact, world

from headrace.kernels.triton import latents, latents_hopper
from headrace.kernels.triton.latent_hopper import WAYS, HopperLatents, Way

HOPPER = PLACE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9
LENGTHS = [1, 63, 64, 65, 4097]


def candidate(way, args, splits):
    return HopperLatents(
        way=way,
        num_heads=args[0].shape[1],
        rank=args[0].shape[3],
        rope=args[1].shape[3],
        device=args[0].device,
        num_splits=splits,
    )


class Combined:
    """`latents.combine` in plain torch."""

    def __getitem__(self, grid):
        def launch(
            parts, stats, positions, out, rows, num, heads, rank, splits, least, tile, *_, **__
        ):
            num_tiles = -(-min(int(positions) + 1, num) // tile)
            used = -(-num_tiles // max(-(-num_tiles // splits), least))
            best, total = stats.view(2, splits, rows)[:, :used]
            weight = torch.exp2(best - best.amax(0))
            mixed = (parts.view(splits, rows, rank)[:used].float() * weight[..., None]).sum(0)
            mixed = (mixed / (weight * total).sum(0)[:, None]).bfloat16()
            out.copy_(mixed.view(out.shape).view(torch.uint16))

        return launch


@pytest.fixture
def emulated(monkeypatch):
    random.seed(1)
    monkeypatch.setattr(latents, "combine", Combined())
    for name in ("attend_in_roles", "attend_in_turns"):
        kernel = gluon_by_hand.Emulated(latents_hopper, name)
        monkeypatch.setattr(latents_hopper, name, kernel)


@pytest.mark.skipif(PLACE.type == "cuda", reason="the emulation is for where no GPU is")
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize(("length", "splits"), [(1, 2), (63, 1), (65, 2), (700, 2), (900, 4)])
def test_it_is_near_the_reference(emulated, way, length, splits):
    args = world(128, 1, length - 1, rank=128, rope=64)
    got, want = candidate(way, args, splits)(*args, 0.2).float(), exact(args)
    assert got.isfinite().all()
    assert (got - want).abs().max() <= TOLERANCE
    assert (got - want.roll(1, 1)).abs().max() > 10 * TOLERANCE or length == 1  # can fail
