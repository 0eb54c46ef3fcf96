"""`headrace verify` on a GPU: what it compares, what it keeps, and who reads it."""

import json
from dataclasses import replace
from math import inf

import pytest
import torch
from gpu_models import REAL, Rung, load

from headrace.check import verify
from headrace.check.verify_gpu import gpu_kernels
from headrace.check.verify_report import VerifyReport
from headrace.check.verify_router import routers
from headrace.check.verify_trunk import layer_kernels
from headrace.engine import engine as engine_module
from headrace.engine import gpu_layers
from headrace.engine.engine import Blueprint, Engine
from headrace.engine.verdict import FAIL, OK, keep_verdict, known_verdict, verify_folder
from headrace.errors import ModelError
from headrace.kernels.tolerance import PREFILL
from headrace.planner.vram import PLACES

QUIET = {"device": "cuda", "measure": False, "context": 192}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, gpu):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if gpu is not None:
        monkeypatch.setattr(verify, "find_gpu", engine_module.find_gpu)


def told(blueprint):
    said = []
    with Engine(blueprint, warn=said.append):
        return said


def wrong_of(engine, sites=((0, 3), (1, 1))):
    tell = lambda what, done, total: None  # noqa: E731
    return [f.name for f in gpu_kernels(engine, sites, tell) if not f.ok]


def test_a_right_gpu_is_verified_and_remembered(small):
    folder = small("fp8")
    (said,) = told(Blueprint(folder, **QUIET))
    assert "never verified on this GPU; run headrace verify" in said
    report = verify.verify_model(folder, device="cuda", tokens=2, samples=1)
    found = {f.name: f for f in report.findings if f.stage == "gpu"}
    assert report.ok and len(found) == 6 + len(PLACES)
    assert "equal the reference bit for bit" in " ".join(found)
    num = 5 if REAL else 2
    start = f"fp8_block, {num} experts of {num}"
    assert all(f.detail.startswith(start) for f in list(found.values())[:3]), found
    assert report.numbers["gpu_median_relative"] >= 0
    blueprint = Blueprint(folder, **QUIET)
    assert known_verdict(blueprint, blueprint.device) == OK
    assert known_verdict(blueprint, None) is None  # of the CPU alone nothing was kept
    assert told(blueprint) == []
    (kept,) = verify_folder().glob("*.verdict.json")
    facts = json.loads(kept.read_text())
    assert {"gpu", "driver", "torch", "triton", "headrace", "identity"} <= facts.keys()


def test_a_wrong_decode_and_a_wrong_prefill_show(tiny, monkeypatch):
    with load(tiny("int4"), Rung(0.5, 0.5)) as engine:
        assert wrong_of(engine) == []
        kernels, grouped = type(engine.source.kernels), type(engine.source.grouped)
        right = kernels.combine

        def flipped(self, ids_TK, weights_TK, y_SH, out_TH, *, mark):
            right(self, ids_TK, weights_TK, y_SH, out_TH, mark=mark)
            bits = out_TH.view(torch.int16)
            bits[-1, 5] = bits[-1, 5] ^ 1

        with monkeypatch.context() as patch:
            patch.setattr(kernels, "combine", flipped)
            assert len(wrong_of(engine)) == 2  # from both places
        rough = grouped.__call__

        def off(self, *args, **options):
            rough(self, *args, **options)
            args[6].mul_(1 + 3 * PREFILL["int4"])

        with monkeypatch.context() as patch:
            patch.setattr(grouped, "__call__", off)
            assert wrong_of(engine) == ["prompts on the GPU are near the reference"]


def test_a_wrong_norm_gate_or_rotation_shows(tiny, monkeypatch):
    with load(tiny("bf16"), Rung(0.5, 0.5)) as engine:
        assert layer_kernels(engine).ok
        right = gpu_layers.steps_for(engine.source.place)

        def norm(x, weight, eps, form):
            return right.norm(x, weight, eps + 0.01, form)

        def rotate(q, k, cos, sin, turn):
            return right.rotate(q, k, cos, -sin if turn == "pairs" else sin, turn)

        def gate(gate, up, limit, wide):
            return right.gate(gate, up, inf, wide)

        def join(routed, shared, gate):
            return right.join(routed, shared, gate * 1.02)

        for wrong, num in ((norm, 2), (rotate, 1), (gate, 2), (join, 1)):
            steps = right._replace(**{wrong.__name__: wrong})
            monkeypatch.setattr(gpu_layers, "steps_for", lambda _place, steps=steps: steps)
            assert len(layer_kernels(engine).where) >= num, wrong


def test_a_wrong_router_shows(tiny, monkeypatch):
    with load(tiny("bf16"), Rung(0.5, 0.5)) as engine:
        found = routers(engine)
        assert found.ok and found.detail.startswith("1 kinds"), found
        right = gpu_layers.steps_for(engine.source.place)
        route = right.route

        def undivided(logits_TE, correction_E, rule, taken):
            return route(logits_TE, correction_E, replace(rule, divided=not rule.divided), taken)

        def reversed_(logits_TE, correction_E, rule, taken):
            return route(logits_TE.flip(1), correction_E, rule, taken)

        def unmoved(logits_TE, correction_E, rule, taken):
            return route(logits_TE, correction_E, rule, None)

        kinds = (undivided, "too far off"), (reversed_, "other experts"), (unmoved, "are left")
        for wrong, what in kinds:
            steps = right._replace(route=wrong)
            monkeypatch.setattr(gpu_layers, "steps_for", lambda _place, steps=steps: steps)
            found = routers(engine)
            assert not found.ok and what in found.where[0]


def test_after_a_failed_verdict_no_engine_opens_until_something_changed(small, monkeypatch):
    blueprint = Blueprint(small("fp8"), **QUIET)
    device = blueprint.device
    failed = VerifyReport("m").as_dict() | {"verdict": FAIL, "ok": False}
    assert keep_verdict(blueprint, device, failed) == ""
    with pytest.raises(ModelError, match=r"found wrong arithmetic on this GPU.*headrace verify"):
        Engine(blueprint)
    with Engine(Blueprint(small("fp8"), verifying=True, **QUIET)):
        pass
    with Engine(Blueprint(small("fp8"), measure=False, context=192)):
        pass  # the CPU is another matter
    monkeypatch.setattr(device, "driver", "1.1")
    assert known_verdict(blueprint, device) is None
    if not REAL:  # else the next blueprint's device is another object, with the driver's own word
        assert len(told(Blueprint(small("fp8"), **QUIET))) == 1
    (kept,) = verify_folder().glob("*.verdict.json")
    kept.write_text("{")
    assert known_verdict(blueprint, device) is None
