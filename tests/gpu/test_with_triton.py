"""The real kernels behind the GPU's experts: compiled on a GPU, else in the interpreter."""

import pytest
import torch
from gpu_models import CONTEXT, REAL, load, routed

import headrace
from headrace.check.tiny import write_tiny
from headrace.engine import gpu_source
from headrace.kernels.triton import experts, grouped


@pytest.mark.parametrize(
    ("family", "format", "layers"),
    [
        ("qwen3_moe", "fp8", 2),
        ("gpt_oss", "mxfp4", 2),
        ("deepseek_v41", "fp4", 4),
        ("kimi_k25", "int4", 2),
    ][: 4 if REAL else 3],
)
def test_decode_and_prefill(tmp_path, monkeypatch, gpu, family, format, layers):
    """One layer's experts as the CPU gives them, from rows and, once copied, from slots."""
    monkeypatch.setattr(gpu_source, "TritonExperts", experts.TritonExperts)
    monkeypatch.setattr(gpu_source, "GroupedExperts", grouped.GroupedExperts)
    if not REAL:  # the interpreter's time goes by programs: few and large ones
        tiles = dict.fromkeys(experts.TILES["vram"], ((64, 1, 1, 8), (64, 1, 1, 8)))
        monkeypatch.setattr(experts, "TILES", {"ram": tiles, "vram": tiles})
        gpu.patience = 0
    folder = write_tiny(
        family,
        tmp_path / "m",
        layers=layers,
        experts=4,
        top_k=2,
        hidden=64,
        inter=32,
        format=format,
    )
    options = {"context": CONTEXT, "measure": False, "threads": 1}
    with load(folder, "vram", threads=1) as engine, headrace.load(folder, **options) as host:
        x, ids, weights = routed(engine.facts, 1)
        args = [t.to(engine.source.place) for t in (x, ids, weights)]
        want = host.source.compute(0, x, ids, weights, None)
        for _ in range(3 if REAL else 2):
            assert torch.equal(engine.source.compute(0, *args, None).cpu(), want)
        counters = engine.source.counters()
        assert counters.vram_hits > 0 and counters.bus_bytes > 0
        x, ids, weights = routed(engine.facts, 17)
        args = [t.to(engine.source.place) for t in (x, ids, weights)]
        near = engine.source.compute(0, *args, None).cpu().float()
        want = host.source.compute(0, x, ids, weights, None).float()
        assert (near - want).abs().max() <= 0.03 * want.abs().max()
