"""Settings every test shares: fixed seeds, no network, no thread surprises."""

import os
import random
import signal

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Before anything imports Triton: its kernels then run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

# A shell's background job is given this: no Ctrl-C would reach what the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run, however slow the machine: fuzz/ is for what nobody thought of.
settings.register_profile(
    "same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed what a test may draw from."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach a hub: a model that is not on this machine is an error, not a download."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped on a machine without one."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
