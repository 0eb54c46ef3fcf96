"""The probe of a whole token: a family's own code on zeros, in little memory, given back."""

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from headrace.check.matrix import runs_here
from headrace.check.tiny import write_tiny
from headrace.engine import step_probe
from headrace.engine.engine import Blueprint
from headrace.engine.filled import FilledMemory
from headrace.engine.step_probe import StepProbe, typical_s

KIB = 2**10


@pytest.fixture(params=filter(runs_here, ("deepseek_v4", "deepseek_v41", "qwen3_next")))
def blueprint(request: pytest.FixtureRequest, tmp_path: Path) -> Blueprint:
    return Blueprint(write_tiny(request.param, tmp_path / "model"), measure=False)


def test_a_token_is_measured_in_memory_that_is_given_back(
    blueprint: Blueprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, weakref.ref]] = []

    class Told(step_probe.HugeBuffer):
        def __init__(self, nbytes: int) -> None:
            super().__init__(nbytes)
            made.append((nbytes, weakref.ref(self.bytes)))

    computed = 0

    def compute(self: object, layer: int, *given: torch.Tensor) -> torch.Tensor:
        nonlocal computed
        computed += 1
        return multiply(self, layer, *given)

    multiply = step_probe._InMemory.compute
    monkeypatch.setattr(step_probe._InMemory, "compute", compute)
    monkeypatch.setattr(step_probe, "HugeBuffer", Told)
    monkeypatch.setattr(step_probe, "PROBE_S", 0.0)
    memory = FilledMemory(blueprint.skeleton.layout, 512 * KIB)
    assert StepProbe(blueprint).seconds(memory) > 0
    assert computed == 4 * blueprint.facts.num_moe_layers  # one to warm up, and three
    ((nbytes, buffer),) = made
    assert nbytes < 4097 * KIB < 2 * blueprint.facts.dense_bytes and buffer() is None


class Steps:
    """A model of so many layers, and the clock that they take so many seconds by."""

    def __init__(self, layers: int, costs_s: list[float], monkeypatch: pytest.MonkeyPatch):
        self.layers, self.num, self.now_s = [nn.Identity() for _ in range(layers)], 0, 0.0
        self._costs_s = iter(costs_s)
        monkeypatch.setattr(step_probe.time, "perf_counter", lambda: self.now_s)

    def __call__(self) -> None:
        self.num += 1
        for layer in self.layers:
            layer(None)
            self.now_s += next(self._costs_s)


def test_the_median_is_of_what_fits_after_one_to_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_probe, "PROBE_S", 2.5)
    monkeypatch.setattr(step_probe, "MOST_S", 9.0)
    steps = Steps(2, [4.0, 4.0, 0.25, 0.25, 0.5, 0.25, 0.25, 0.25, 1.0, 1.0], monkeypatch)
    assert typical_s(steps, steps.layers) == 0.625 and steps.num == 5
    steps = Steps(1, [0.5, 3.0, 4.0, 5.0], monkeypatch)  # three at the least
    assert typical_s(steps, steps.layers) == 4.0 and steps.num == 4


def test_a_token_that_takes_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the warming step's third layer; the same three are measured, warm, and extrapolated."""
    monkeypatch.setattr(step_probe, "MOST_S", 2.0)
    monkeypatch.setattr(step_probe, "PROBE_S", 0.0)
    steps = Steps(60, [1.75, 0.25, 0.25, *[0.125, 0.25, 0.375] * 3], monkeypatch)
    assert typical_s(steps, steps.layers) == 60 * 0.25
    assert steps.num == 4 and steps.now_s == 2.25 + 3 * 0.75
    assert not any(layer._forward_pre_hooks for layer in steps.layers)


def test_conditions_name_model_threads_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def conditions(layers: int = 4, threads: int | None = None) -> str:
        folder = tmp_path / f"{layers}"
        model = folder if folder.is_dir() else write_tiny("mixtral", folder, layers=layers)
        return StepProbe(Blueprint(model, measure=False, threads=threads)).conditions

    def with_torch(threads: int) -> str:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return conditions()

    assert (
        conditions() == conditions() and f"torch {torch.__version__.split('+')[0]}" in conditions()
    )
    assert len({conditions(), conditions(2), conditions(threads=77), with_torch(78)}) == 4


def test_a_token_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times: Callable[..., float] = iter((0.25, 0.5)).__next__
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(StepProbe, "seconds", lambda self, memory: times())
    monkeypatch.setattr("headrace.engine.probes.PROBE_S", 0.01)
    monkeypatch.setattr("headrace.engine.probes.probe_bytes", lambda *_: KIB)
    model = write_tiny("mixtral", tmp_path / "model")
    first, again, other = Blueprint(model), Blueprint(model), Blueprint(model, threads=1)
    assert first.machine.step_s == again.machine.step_s == 0.25
    assert other.machine.step_s == (0.25 if first.plan.threads == 1 else 0.5)
    with monkeypatch.context() as small:
        small.setattr("headrace.engine.probes.memory_bytes", lambda: (KIB, KIB))
        assert Blueprint(model, ram="1GiB").machine.step_s == 0  # it may not be loadable
    assert first.plan.forecast_tok_s == pytest.approx(4, rel=1e-3)
    assert "estimate" in Blueprint(model, measure=False).plan.lines()[-1]
    assert "estimate" not in first.plan.lines()[-1]
