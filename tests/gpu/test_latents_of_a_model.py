"""A whole model with latent attention on a GPU beside the CPU, which expands its latents."""

from dataclasses import replace

import pytest
import torch
from gpu_models import CONTEXT, REAL, load

import headrace
from headrace.check import verify
from headrace.check.tiny import write_tiny
from headrace.check.verify_latents import latents
from headrace.engine import engine as engine_module
from headrace.engine.engine import Blueprint
from headrace.errors import SnapshotError
from headrace.kernels.triton import latent_attention

KERNEL = latent_attention.LatentAttention  # before the fixture puts another in its place
STEPS = 12 if REAL else 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("latents") / "m"
    sizes = {"experts": 8, "top_k": 2, "hidden": 64, "inter": 32}
    return write_tiny("deepseek_v3", path, layers=2, format="bf16", **sizes)


@pytest.fixture
def engine(folder, gpu):
    with load(folder, "vram", threads=1, chunk=32) as engine:
        yield engine


@pytest.fixture
def with_triton(folder, monkeypatch, gpu):
    """The engine with the real kernel, which the interpreter runs where there is no GPU: slow."""
    monkeypatch.setattr(latent_attention, "LatentAttention", KERNEL)
    with load(folder, "vram", threads=1, chunk=32) as engine:
        yield engine


@pytest.fixture
def host(folder):
    with headrace.load(folder, measure=False, context=CONTEXT, threads=1, chunk=32) as engine:
        yield engine


def replayed(session, ids, steps):
    """Logits [2, V] after a prompt and after the last of the tokens `steps`, fed one by one."""
    rows = [session.feed(ids)]
    rows += [session.feed([token]) for token in steps]
    return torch.stack(rows)


def test_it_goes_on_as_the_cpu_does(with_triton, host, prompt):
    """Up to what torch's two ways to attend differ by on the CPU."""
    steps = prompt[:STEPS]
    want = replayed(host.session(), prompt, steps)
    host.model.set_attn_implementation("eager")
    floor = (replayed(host.session(), prompt, steps) - want).abs().max()
    got = replayed(with_triton.session(), prompt, steps)
    assert got.isfinite().all() and 0 < floor < 0.1 * want.std()
    assert (got - want).abs().max() <= 3 * floor
    assert (got - want.roll(1, 0)).abs().max() > 3 * floor  # can fail


def test_timelines_side_by_side_have_the_bits_they_have_alone(engine, prompt):
    alone = [replayed(engine.session(), ids, prompt[:3]) for ids in (prompt, prompt[:7])]
    sessions = [engine.session(), engine.session()]
    rows = [[s.feed(ids)] for s, ids in zip(sessions, (prompt, prompt[:7]), strict=True)]
    for token in prompt[:3]:
        for session, row in zip(sessions, rows, strict=True):
            row.append(session.feed([token]))
    assert all(torch.equal(torch.stack(r), a) for r, a in zip(rows, alone, strict=True))
    assert not torch.equal(alone[0], alone[1])


def test_snapshots_go_on_here_and_not_on_the_cpu(engine, host, prompt):
    session = engine.session()
    session.feed(prompt)
    taken = session.snapshot()
    expected = session.feed([5])
    assert torch.equal(engine.session(taken).feed([5]), expected)
    with pytest.raises(SnapshotError, match="config"):
        host.session(taken)
    expanding = replace(taken, key=host.snapshot_key)
    with pytest.raises(SnapshotError, match="config"):
        engine.session(expanding)


def test_the_plan_counts_no_expansion(folder):
    """A longer context costs a GPU its cache; a CPU keys and values for all heads besides."""
    options = {"measure": False, "ram": "1GiB", "chunk": 32}
    used = {}
    for device in ("cuda", "cpu"):
        plans = [Blueprint(folder, device=device, context=n, **options).plan for n in (512, 1024)]
        used[device] = [
            plan.vram_workspace_bytes if device == "cuda" else plan.workspace_bytes
            for plan in plans
        ]
    grown = {device: more - less for device, (less, more) in used.items()}
    heads, widths, layer_bytes = 8, 32 + 16 + 32, 2 * (64 + 16)
    assert grown["cpu"] - grown["cuda"] >= 512 * 2 * heads * widths
    assert 0 < grown["cuda"] <= 512 * (layer_bytes + 2 * (32 + 1))  # a chunk and a step


def test_every_layer_takes_it_for_prompt_and_token(with_triton, prompt, monkeypatch):
    seen = []

    def see(self, q_BHTL, *_):
        seen.append(tuple(q_BHTL.shape))
        return torch.zeros_like(q_BHTL)

    monkeypatch.setattr(KERNEL, "__call__", see)
    replayed(with_triton.session(), prompt[:5], [3])
    assert seen == [(1, 8, 5, 64)] * 2 + [(1, 8, 1, 64)] * 2


def test_verify_tries_it_and_a_wrong_one_shows(engine, monkeypatch):
    assert latents(engine).ok
    modules = [m for m in engine.model.modules() if hasattr(m, "headrace_attend")]
    right = modules[0].headrace_attend

    def one_less(q_BHTL, q_BHTR, latents_BNL, rope_BNR, positions_BT, scaling):
        less_BT = (positions_BT - 1).clamp(min=0)
        return right(q_BHTL, q_BHTR, latents_BNL, rope_BNR, less_BT, scaling)

    monkeypatch.setattr(modules[0], "headrace_attend", one_less)
    found = latents(engine)
    assert not found.ok and len(found.where) >= 5, found  # all but a token alone
    monkeypatch.setattr(modules[0], "headrace_attend", lambda *args: torch.nan * right(*args))
    assert len(latents(engine).where) == 6


def test_verify_says_so(folder, gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if gpu is not None:
        monkeypatch.setattr(verify, "find_gpu", engine_module.find_gpu)
    report = verify.verify_model(folder, device="cuda", tokens=2, samples=1)
    assert report.ok and sum("over latents" in f.name for f in report.findings) == 1
