"""The service's page in Chromium: a text is typed and its translation shown; the page loads nothing from elsewhere."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from hf_vanilla_transformer.documents.links import Linked
from hf_vanilla_transformer.serving import app as service
from tests.chromium import MARKS, chromium, until

pytestmark = MARKS
MARKUP = "two <img src=x onerror=document.title='broken'> dogs"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


async def capitals(texts: list[str], n_best: int, source: str, target: str, linked: bool) -> list[list[Linked]]:
    if "long" in texts:
        raise ValueError("too long for the model")
    return [[Linked(f"{source}-{target}: {text.upper()}")] for text in texts]


@contextmanager
def served(pairs: list[tuple[str, str]], **settings: Any) -> Iterator[str]:
    """The address of a service in a thread of its own."""
    app = service.create_app(dict.fromkeys(pairs, capitals), service.ServiceSettings(**settings))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(60)


def opened(browser: Any, url: str) -> None:
    browser.get(url)
    until(lambda: browser.find_elements(By.CSS_SELECTOR, "#to option"))


def text_of(browser: Any, name: str) -> str:
    return browser.find_element(By.ID, name).text


def typed(browser: Any, text: str) -> str:
    """Types a text, and returns the translation or the problem that is shown."""
    area = browser.find_element(By.ID, "text")
    area.clear()
    area.send_keys(text)
    browser.find_element(By.TAG_NAME, "button").click()
    return until(lambda: text_of(browser, "translation").strip("…") or text_of(browser, "problem"))


def options(browser: Any, name: str) -> list[str]:
    found = Select(browser.find_element(By.ID, name)).options
    return [one.text for one in found if one.get_attribute("value") != "auto"]


NAMELESS = """return [...document.querySelectorAll('button, input, select, textarea, output')].filter((one) =>
    !one.textContent && !one.labels?.length && !one.ariaLabelledByElements).map((one) => one.outerHTML)"""


def test_a_text_is_translated_between_the_languages_of_the_service(browser: Any) -> None:
    with served([("en", "de"), ("en", "pt_BR"), ("de", "en")]) as url:
        browser.get_log("performance")
        browser.get_log("browser")
        opened(browser, url)
        assert options(browser, "from") == ["English", "German"]
        assert options(browser, "to") == ["German", "Brazilian Portuguese"]
        assert typed(browser, "two dogs") == "en-de: TWO DOGS"
        Select(browser.find_element(By.ID, "to")).select_by_value("pt_BR")
        assert typed(browser, MARKUP) == f"en-pt_BR: {MARKUP.upper()}"
        output = browser.find_element(By.ID, "translation")
        assert (output.get_attribute("lang"), output.get_attribute("aria-live")) == ("pt-BR", "polite")
        Select(browser.find_element(By.ID, "from")).select_by_value("de")
        assert options(browser, "to") == ["English"]
        assert typed(browser, "zwei Hunde\nlaufen") == "de-en: ZWEI HUNDE\nde-en: LAUFEN"
        assert browser.find_element(By.ID, "text").get_attribute("lang") == "de"
        assert browser.title == "Translate"
        assert browser.execute_script(NAMELESS) == []
        messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        requests = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        asked = {one["request"]["url"] for one in requests if one["documentURL"] == url}
        assert {one for one in asked if not one.startswith("data:")} == {url, f"{url}languages", f"{url}translate"}
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_one_pair_needs_no_choice_and_errors_are_shown(browser: Any) -> None:
    with served([("en", "de")], api_key="k") as url:
        opened(browser, url)
        assert "api_key is missing" in typed(browser, "two dogs")
        browser.find_element(By.ID, "key").send_keys("k")
        assert typed(browser, "two dogs") == "en-de: TWO DOGS"
        assert "(German)" in text_of(browser, "title")
        assert typed(browser, "long") == "too long for the model"
        assert text_of(browser, "translation") == ""


def test_the_language_is_detected(browser: Any) -> None:
    pytest.importorskip("py3langid", reason="py3langid is not installed: pip install '.[detect]'")
    with served([("en", "de"), ("de", "en")]) as url:
        opened(browser, url)
        Select(browser.find_element(By.ID, "from")).select_by_value("auto")
        assert options(browser, "to") == ["English", "German"]
        text = "die beiden Hunde laufen im Garten"
        assert typed(browser, text) == text  # it is German already
        Select(browser.find_element(By.ID, "to")).select_by_value("en")
        assert typed(browser, text) == f"de-en: {text.upper()}"
        assert browser.find_element(By.ID, "source").text.strip() == "(German)"


@pytest.mark.parametrize("width", [320, 1280])
def test_nothing_is_wider_than_the_screen(browser: Any, tmp_path: Path, width: int) -> None:
    metrics = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": width < 1000}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        with served([("en", "de"), ("zh_Hans", "pt_BR")], api_key="k") as url:
            opened(browser, url)
            typed(browser, "x" * 200)
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
