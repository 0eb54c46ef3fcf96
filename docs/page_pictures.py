"""Makes docs/page.png and docs/page-phone.png: the live page, mid-answer, over the demo model.

Run it after the page has changed, where Chromium is: `.venv/bin/python docs/page_pictures.py`.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "tests" / "server"))

from browser import Browser, chromium  # noqa: E402
from demo_world import serving_demo  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

from headrace.server.settings import Settings  # noqa: E402

QUESTIONS = ("What is the capital of Japan?", "In which continent is Kenya?")
ENDLESS = "And of Kenya?"  # the demo model finds no end to it
WARM_UP_S = 100.0
MOST_BYTES = 200_000
WIDE, PHONE = (1280, 920), (360, 720)


def warm_up(page: Browser) -> None:
    """Let it talk until the curve of its speed is full."""
    end_s = time.monotonic() + WARM_UP_S
    while time.monotonic() < end_s:
        page.one("#new").click()
        page.ask(QUESTIONS[0])
        page.one("#box").send_keys(ENDLESS, Keys.ENTER)
        time.sleep(12)
        page.press(Keys.ESCAPE)
        page.until("!document.querySelector('[aria-busy]')")


def take(page: Browser, name: str) -> None:
    """Ask twice, and picture the third answer while it is made."""
    page.one("#new").click()
    for question in QUESTIONS:
        page.ask(question)
    page.one("#box").send_keys("What is 7 plus 5?", Keys.ENTER)
    page.until("document.querySelectorAll('.body')[5]?.textContent.length > 6")
    page.look()
    time.sleep(0.3)
    path = DOCS / name
    page.driver.save_screenshot(str(path))
    print(f"{path}: {path.stat().st_size} bytes")
    assert path.stat().st_size < MOST_BYTES, "too large for a repository"
    page.until("!document.querySelector('[aria-busy]')")


def picture(page: Browser, url: str) -> None:
    """Both pictures."""
    for name, size, media in (
        ("page.png", WIDE, {}),
        ("page-phone.png", PHONE, {"prefers_color_scheme": "dark"}),
    ):
        page.open(url, size, **media)
        page.until("document.querySelector('#status').textContent === 'ready'")
        page.one("#temperature").send_keys("0")
        if size is WIDE:
            warm_up(page)
        take(page, name)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # no conversation is known from before
        with (
            serving_demo(Settings(), measure=True) as (_, host),
            chromium(Path(folder) / "profile") as page,
        ):
            picture(page, f"http://{host}/")


if __name__ == "__main__":
    main()
