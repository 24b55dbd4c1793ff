"""Chromium without a window, for tests of pages; it needs selenium, chromedriver and Chromium."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver")

DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1200,1000",
)  # fmt: skip
MARKS = [
    pytest.mark.browser,
    pytest.mark.skipif(DRIVER is None, reason="needs chromedriver and Chromium"),
    pytest.mark.timeout(600),
]


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """Yields a browser that logs messages and requests; `profile` is an empty folder."""
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def until(condition: Callable[[], Any]) -> Any:
    """Waits for a condition, a minute at most, and returns what it returned."""
    end = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found
