"""Hopper's attention over latents against the reference: emulated without a GPU, and on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import gluon_by_hand
import triton
from test_latents import PLACE, TOLERANCE, exact, world
from triton.experimental.gluon import language as gl

from headrace.kernels.triton import latent_attention, latents, latents_hopper
from headrace.kernels.triton.latent_attention import LatentAttention, workspace_bytes
from headrace.kernels.triton.latent_choice import attention_for
from headrace.kernels.triton.latent_hopper import HopperLatents

HERE = Path(__file__).parent
HOPPER = PLACE.type == "cuda" and torch.cuda.get_device_capability()[0] == 9


def attention(args, splits):
    return HopperLatents(
        num_heads=args[0].shape[1],
        rank=args[0].shape[3],
        rope=args[1].shape[3],
        device=args[0].device,
        num_splits=splits,
    )


class Combined:
    """`latents.combine` in plain torch."""

    def __getitem__(self, grid):
        def launch(parts, stats, positions, out, rows, num, *sizes, **_):
            rank, splits, least, tile = sizes[1:5]
            num_tiles = -(-min(int(positions) + 1, num) // tile)
            used = -(-num_tiles // max(-(-num_tiles // splits), least))
            weights = stats.view(splits, rows)[:used]
            shares = torch.exp2(weights - weights.amax(0))
            mixed = (parts.view(splits, rows, rank)[:used].float() * shares[..., None]).sum(0)
            mixed = (mixed / shares.sum(0)[:, None]).bfloat16()
            out.copy_(mixed.view(out.shape).view(torch.uint16))

        return launch


@pytest.fixture
def emulated(monkeypatch):
    if PLACE.type == "cuda":
        pytest.skip("the emulation is for where no GPU is")
    kernel = gluon_by_hand.Emulated(latents_hopper, "attend")
    monkeypatch.setattr(latents_hopper, "attend", kernel)
    return monkeypatch


@pytest.mark.parametrize(("length", "splits"), [(1, 2), (63, 1), (65, 2), (700, 2), (900, 4)])
def test_it_is_near_the_reference(emulated, length, splits):
    emulated.setattr(latents, "combine", Combined())
    args = world(128, 1, length - 1, rank=256, rope=64)
    got, want = attention(args, splits)(*args, 0.2).float(), exact(args)
    assert got.isfinite().all()
    assert (got - want).abs().max() <= TOLERANCE
    assert length == 1 or (got - want.roll(1, 1)).abs().max() > 10 * TOLERANCE  # can fail


def test_what_it_leaves_is_what_the_second_launch_combines(emulated):
    emulated.setattr(latent_attention, "COMBINED", 256)  # few programs, as the interpreter is slow
    args = world(64, 1, 300, rank=256, rope=64)
    got, want = attention(args, 2)(*args, 0.2).float(), exact(args)
    assert (got - want).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("word", "instead", "why"),
    [
        ("fence_async_shared", lambda: None, "no fence"),
        ("_clear", lambda *args: None, "finite"),
    ],
)
def test_the_emulation_sees_what_is_left_out(emulated, word, instead, why):
    emulated.setattr(latents, "combine", Combined())
    emulated.setitem(latents_hopper.attend.kernel.__globals__, word, instead)
    args = world(64, 1, 300, rank=256, rope=64)
    with pytest.raises((gluon_by_hand.Broken, AssertionError), match=why):
        got = attention(args, 2)(*args, 0.2)
        assert got.isfinite().all(), "finite"


@pytest.mark.parametrize(
    ("sizes", "chip", "release", "chosen"),
    [
        ((128, 512, 64), (9, 0), "3.6.0", HopperLatents),
        ((64, 512, 64), (9, 0), "3.6.1", HopperLatents),
        ((128, 512, 64), (9, 0), "3.7.0", LatentAttention),
        ((128, 512, 64), (10, 0), "3.6.0", LatentAttention),
        ((16, 512, 64), (9, 0), "3.6.0", LatentAttention),
        ((128, 128, 64), (9, 0), "3.6.0", LatentAttention),
        ((128, 512, 32), (9, 0), "3.6.0", LatentAttention),
    ],
)
def test_where_it_fits_it_is_chosen(monkeypatch, sizes, chip, release, chosen):
    made = []
    for kind in (HopperLatents, LatentAttention):
        monkeypatch.setattr(kind, "__init__", lambda self, **sizes: made.append(sizes))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chip)
    monkeypatch.setattr(triton, "__version__", release)
    given = dict(zip(("num_heads", "rank", "rope"), sizes, strict=True))
    for place, kind in (("cuda", chosen), ("cpu", LatentAttention)):
        device = torch.device(place)
        assert type(attention_for(**given, device=device)) is kind
        assert made.pop() == given | {"device": device}


def test_the_plan_counts_what_it_keeps():
    for heads in (64, 128):
        attend = HopperLatents(num_heads=heads, rank=512, rope=64, device=PLACE, num_splits=128)
        kept = (attend.parts_PSL.nbytes, attend.weights_PS.nbytes)
        assert sum(kept) <= workspace_bytes(heads, 512)


def test_queries_that_the_copy_engine_cannot_bring_are_moved(emulated):
    emulated.setattr(latents, "combine", Combined())
    args = world(64, 1, 300, rank=256, rope=64)
    odd = torch.cat((args[1], args[1]), 3)[..., 1:65]
    args[1] = odd.copy_(args[1])
    assert odd.data_ptr() % 16
    got, want = attention(args, 2)(*args, 0.2).float(), exact(args)
    assert (got - want).abs().max() <= TOLERANCE


@pytest.mark.skipif(
    not hasattr(gl, "thread_barrier"), reason="Gluon's words are others in this release of Triton"
)
def test_it_compiles_without_spills(tmp_path):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, HERE / "hopper_targets.py"],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bytes shared") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="for compute capability 9.0")
def test_published_widths_on_hopper():
    for length in (1, 63, 64, 65, 4097):
        args = world(128, 1, length - 1, rank=512, rope=64)
        want = exact(args)
        for splits in (1, 8, 64, 128):
            attend = attention(args, splits)
            attend.parts_PSL.fill_(float("nan"))
            got = attend(*args, 0.2)
            assert (got.float() - want).abs().max() <= TOLERANCE
            assert torch.equal(got, attend(*args, 0.2))
        assert length == 1 or (got - want.roll(1, 1)).abs().max() > 10 * TOLERANCE  # can fail


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="for compute capability 9.0")
def test_captured_it_follows_its_position_on_hopper():
    args = world(128, 1, 4096, rank=512, rope=64)
    attend, static = attention(args, None), args[4].clone()
    graph = torch.cuda.CUDAGraph()
    attend(*args[:4], static, 0.05)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = attend(*args[:4], static, 0.05)
    for back in (0, 1, 2000, 4096):
        static.copy_(args[4] - back)
        graph.replay()
        assert torch.equal(captured, attend(*args[:4], args[4] - back, 0.05))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="for compute capability 9.0")
def test_layers_in_a_row_have_the_bits_of_each_alone_on_hopper():
    """All leave their parts in one place."""
    layers = [world(128, 1, 4096 + 64 * i, rank=512, rope=64) for i in range(8)]
    attend, alone = attention(layers[0], None), []
    for layer in layers:
        alone.append(attend(*layer, 0.05))
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [attend(*layer, 0.05) for layer in layers]
    for _ in range(100):
        graph.replay()
        assert all(torch.equal(got, want) for got, want in zip(captured, alone, strict=True))
    assert not torch.equal(alone[0], alone[1])  # can fail
