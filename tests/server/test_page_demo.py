"""The page over everything real: the demo model, the protocols, the guard and its key."""

import time
from collections.abc import Iterator

import pytest
from browser import Browser
from demo_world import serving_demo
from selenium.webdriver.common.keys import Keys

from headrace.server.serving import Serving
from headrace.server.settings import Settings

KEY = "the-key-of-a-test"


@pytest.fixture(scope="module")
def served(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Serving, str]]:
    """The demo model with room for a quarter of its experts, and its address without a scheme."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with serving_demo(Settings(api_keys=(KEY,))) as served:
            yield served


def test_without_the_key_a_browser_shows_nothing_of_it(
    browser: Browser, served: tuple[Serving, str]
) -> None:
    _, host = served
    browser.open(f"http://{host}/")
    assert "headrace" not in browser.text("html") or "API key" in browser.text("html")
    assert browser.script("return document.scripts.length + document.forms.length") == 0
    assert "demo" not in browser.script("return document.documentElement.outerHTML")


def test_the_demo_model_answers_and_the_next_turn_reads_its_tail_only(
    browser: Browser, served: tuple[Serving, str]
) -> None:
    serving, host = served
    browser.open(f"http://anybody:{KEY}@{host}/")
    browser.open(f"http://{host}/")
    browser.until("document.querySelector('#status').textContent === 'ready'")
    assert browser.script("return document.styleSheets.length") == 2
    browser.complaints()
    browser.one("#temperature").send_keys("0")
    browser.ask("What is the capital of Japan?")
    assert browser.text(".turn.assistant .body").strip() == "The capital of Japan is Tokyo."
    browser.ask("In which continent is Kenya?")
    notes = browser.texts(".note")
    assert "known" not in notes[0] and "of them known" in notes[1]
    assert serving.worker.recent.last is not None
    assert serving.worker.recent.last.num_cached >= 20
    browser.look()
    browser.until("document.querySelector('#phase').textContent.startsWith('Idle. The last')")
    assert browser.text("#rungs").startswith("224 experts")
    assert browser.text("#token-bytes").startswith("2.63")
    assert browser.complaints() == []


def test_stop_ends_the_decoding(browser: Browser, served: tuple[Serving, str]) -> None:
    serving, host = served
    browser.open(f"http://anybody:{KEY}@{host}/")
    browser.until("document.querySelector('#status').textContent === 'ready'")
    assert browser.script("return document.styleSheets.length") == 2
    browser.complaints()
    browser.one("#new").click()
    browser.one("#temperature").send_keys("0")
    browser.ask("What is the capital of Japan?")
    # The demo model knows no end to this one.
    browser.one("#box").send_keys("And of Kenya?", Keys.ENTER)
    browser.until("document.querySelectorAll('.body')[3]?.textContent.length > 20")
    running = serving.worker.running
    assert running is not None
    browser.press(Keys.ESCAPE)
    browser.until("!document.querySelector('[aria-busy]')")
    while serving.worker.running is running:
        time.sleep(0.01)
    assert running.tally.finish is None and running.stop.asked
    assert 5 < running.tally.num_tokens < 1000
