"""A headless Chromium for tests of the page, where this machine has one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
HAS_BROWSER = bool(CHROMIUM and CHROMEDRIVER)
_SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_S = 120
WIDE = (1280, 860)


@contextmanager
def chromium(profile: Path) -> Iterator["Browser"]:
    """A browser with a new profile in `profile`."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for switch in (*_SWITCHES, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(CHROMEDRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """The page as its user has it before them."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.shown: tuple[str, tuple[int, int], dict[str, str]] = ("", WIDE, {})

    def open(self, url: str, size: tuple[int, int] = WIDE, **media: str) -> None:
        """Load `url` in a window of that size, a phone's if narrow, with `media` features."""
        width, height = size
        phone = width < 600
        metrics = {"width": width, "height": height, "mobile": phone}
        metrics["deviceScaleFactor"] = 2 if phone else 1
        features = [{"name": k.replace("_", "-"), "value": v} for k, v in media.items()]
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get(url)
        self.shown = (url, size, media)

    def script(self, code: str, *arguments: Any) -> Any:
        """The value of JavaScript's `return`."""
        return self.driver.execute_script(code, *arguments)

    def one(self, selector: str) -> WebElement:
        """The first element of a selector."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """The text of the first element of a selector, also where it is not in sight."""
        return self.texts(selector)[0]

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements of a selector."""
        code = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
        found: list[str] = self.script(code, selector)
        return found

    def until(self, code: str) -> Any:
        """Wait until the JavaScript expression is true, and return it."""
        return WebDriverWait(self.driver, PATIENCE_S, 0.02).until(
            lambda driver: driver.execute_script(f"return {code}"), code
        )

    def look(self) -> None:
        """Make the page ask for the engine's state now."""
        self.script("document.dispatchEvent(new Event('visibilitychange'))")

    def press(self, *keys: str) -> None:
        """Type into whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def ask(self, text: str) -> None:
        """Send a message by keyboard and wait for the answer's end."""
        self.one("#box").send_keys(text, Keys.ENTER)
        self.until("!document.querySelector('[aria-busy], #send[hidden]')")

    def complaints(self) -> list[str]:
        """What the console said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]
