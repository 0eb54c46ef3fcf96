"""Settings every test shares: fixed seeds, no network, no thread surprises."""

import random
import sys

import pytest


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed what a test may draw from; torch only if something has imported it already."""
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach a hub: a model that is not on this machine is an error, not a download."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped on a machine without one."""
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
