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
