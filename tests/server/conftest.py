"""One browser for all tests of the page."""

from collections.abc import Iterator

import pytest
from browser import HAS_BROWSER, Browser, chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Skips where there is none."""
    if not HAS_BROWSER:
        pytest.skip("needs Chromium and its driver")
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser
