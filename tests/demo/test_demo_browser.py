"""The page in a browser: what a user types, chooses and sees, and that text stays text."""

import json
import time

import pytest

pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.chromium import MARKS, chromium

PATIENCE = 120  # seconds

pytestmark = MARKS


@pytest.fixture
def driver(tmp_path):
    with chromium(tmp_path) as driver:
        yield driver


def test_translate_and_look_at_the_attention(driver, page):
    def until(condition, what):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                if found := condition():
                    return found
            except Exception:  # an element that has just been replaced
                pass
            time.sleep(0.1)
        raise AssertionError(f"{what}: not after {PATIENCE} s; the page says {find('body')[0].text[-2000:]}")

    def find(css):
        return driver.find_elements(By.CSS_SELECTOR, css)

    def translate(text):
        (box,) = find("#source textarea")
        box.send_keys(Keys.CONTROL + "a", Keys.DELETE)
        box.send_keys(text)
        find("#translate")[0].click()
        until(lambda: find("#translation textarea")[0].get_attribute("value"), "a translation")
        until(lambda: "\n1\n4\n" in find("#candidates")[0].text, "the table")

    def in_frame(condition):
        def ask():
            driver.switch_to.default_content()
            driver.switch_to.frame(find("#attention iframe")[0])
            return condition()

        found = until(ask, "the attention")
        driver.switch_to.default_content()
        return found

    driver.get(page.address)
    until(lambda: find("#source textarea"), "the page")
    until(lambda: [one for one in find("button") if one.text == "half past nine"], "the example")[0].click()
    until(lambda: find("#source textarea")[0].get_attribute("value") == "half past nine", "the example's text")
    translate("half past nine")
    assert in_frame(lambda: find("#part option:checked")[0].text) == "Cross-attention"
    said = in_frame(lambda: "attends most to" in find("figcaption")[0].text and find("figcaption")[0].text)

    def choose_encoder():
        find("#part")[0].send_keys("Encoder")
        return "attends most to" in find("figcaption")[0].text and find("figcaption")[0].text != said

    assert in_frame(choose_encoder)

    # Another translation, with the keyboard
    frame = find("#attention iframe")[0].get_attribute("srcdoc")
    find("#choice input")[0].send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)
    until(lambda: find("#attention iframe")[0].get_attribute("srcdoc") != frame, "the attention of another one")

    # Text is text
    nasty = "<img src=x onerror=top.broken=1>\n<b>${1+1}</b>{{value}}"
    (box,) = find("#source textarea")
    driver.execute_script(
        "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}));",
        box,
        nasty,
    )
    find("#translate")[0].click()
    until(lambda: "\n" in find("#translation textarea")[0].get_attribute("value"), "two lines")
    assert in_frame(lambda: "<" in find(".links")[0].text or "b" in find(".links")[0].text)
    assert in_frame(lambda: not find(".links img, .links b") and find(".links"))
    assert driver.execute_script("return window.broken") is None
    assert find("#candidates img, #candidates tbody b") == []

    # What is wrong is said
    box.send_keys(Keys.CONTROL + "a", Keys.DELETE)
    find("#translate")[0].click()
    until(lambda: "There is nothing to translate" in find("body")[0].text, "the message")

    events = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    asked = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    elsewhere = [
        one
        for one in asked
        if not one.startswith((page.address, "chrome:", "chrome-untrusted:", "data:", "blob:", "about:"))
    ]
    assert elsewhere == []
