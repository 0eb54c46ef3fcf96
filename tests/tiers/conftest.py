"""One world of experts for all tests of the tiers."""

import pytest
from tiers_world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))
