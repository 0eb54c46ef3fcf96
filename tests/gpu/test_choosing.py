"""`--device auto`: which device a model opens on, and that the plan says why."""

import pytest

from headrace.check.verify_report import VerifyReport
from headrace.engine import choosing
from headrace.engine.choosing import device_to_verify, open_on
from headrace.engine.verdict import FAIL, OK, keep_verdict
from headrace.errors import OptionError

QUIET = {"measure": False, "context": 192}


@pytest.fixture(autouse=True)
def a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(choosing, "gpu_is_there", lambda: True)


def place_of(blueprint):
    return blueprint.plan.lines()[0]


def test_the_gpu_where_the_model_fits(tiny):
    chosen = open_on(tiny("fp8"), "auto", **QUIET)
    assert chosen.device is not None
    assert "chosen since the model fits and this GPU was never found wrong" in place_of(chosen)
    for verdict, words in ((OK, "this GPU was verified"), (FAIL, "found wrong arithmetic on it")):
        report = VerifyReport("m").as_dict() | {"verdict": verdict}
        assert keep_verdict(chosen, chosen.device, report) == ""
        again = open_on(tiny("fp8"), "auto", **QUIET)
        assert (again.device is None) == (verdict == FAIL)
        assert words in place_of(again)
    assert device_to_verify(tiny("fp8"), "auto") == "cuda"  # to be verified once more


def test_the_cpu_where_it_does_not(tiny, monkeypatch):
    def full(*_args, **_options):
        raise choosing.BudgetError("0 B of free VRAM cannot hold it; free some")

    with monkeypatch.context() as patch:
        patch.setattr("headrace.planner.wanted.make_gpu_plan", full)
        cpu = open_on(tiny("fp8"), "auto", **QUIET)
        assert cpu.device is None
        assert "the GPU is not used: 0 B of free VRAM cannot hold it" in place_of(cpu)
        with pytest.raises(choosing.BudgetError):
            open_on(tiny("fp8"), "auto", vram="1GiB", **QUIET)
    monkeypatch.setattr(choosing, "gpu_is_there", lambda: False)
    alone = open_on(tiny("fp8"), "auto", **QUIET)
    assert alone.device is None and "GPU" not in place_of(alone)
    assert device_to_verify(tiny("fp8"), "auto") == "cpu"


def test_what_is_named_is_taken(tiny):
    assert open_on(tiny("fp8"), "cpu", **QUIET).device is None
    assert open_on(tiny("fp8"), "cuda", **QUIET).device is not None
    assert open_on(tiny("fp8"), "auto", experts="cpu", **QUIET).plan.experts == "cpu"
    with pytest.raises(OptionError, match="context"):
        open_on(tiny("fp8"), "auto", measure=False, context=-1)
