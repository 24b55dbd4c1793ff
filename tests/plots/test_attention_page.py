"""The HTML page of attention: no token gets out of its data, it loads nothing, and it works in a browser."""

import base64
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from hf_vanilla_transformer.plots.attention_page import attention_page
from hf_vanilla_transformer.translation.attention import Attention

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = Path("/usr/bin/chromedriver")
HOSTILE = [
    "</script><img src=x onerror=document.title='broken'>", "<!--<script>", "]]>", "&amp;", "\u2028", '"', "'", "\\",
    "${1}", "{{data}}", "{{title}}",
]  # fmt: skip
ODD = ["שלום", "半分", "", " ", "\u200b", "\u202e", "🙂", "\x00"]


def attention_with(source, target, layers=2, heads=3):
    s, t = len(source), len(target)
    inputs = ["<s>", *target[:-1]]
    shapes = {"encoder": (s, s), "decoder": (t, t), "cross": (t, s)}
    weights = {name: torch.randn(layers, heads, *shape).mul(3).softmax(-1) for name, shape in shapes.items()}
    return Attention(source, inputs, target, **weights)


class _Page(HTMLParser):
    """The tags of a page, and the text of each script."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.scripts, self.title = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script":
            self.scripts[-1] += data
        if self.lasttag == "title":
            self.title += data


def test_no_token_and_no_title_gets_out_of_its_place():
    tame = _Page(attention_page(attention_with(["a"] * 19, ["b"] * 3), "title"))
    title = "</title><script>1</script>{{data}}"
    page = _Page(attention_page(attention_with([*HOSTILE, *ODD], HOSTILE[:3]), title))
    assert page.tags == tame.tags
    assert page.title.strip() == title
    assert page.scripts[1] == tame.scripts[1]
    (_, _, cross) = json.loads(page.scripts[0])
    assert cross["keys"][: len(HOSTILE)] == [piece if piece.strip() else "␣" for piece in HOSTILE]
    assert cross["keys"][len(HOSTILE) :] == ["שלום", "半分", "␣", "␣", "␣", "␣", "🙂", "␣"]


def test_weights_are_in_the_page():
    attention = attention_with(["a", "b"], ["c", "d", "e"])
    parts = json.loads(_Page(attention_page(attention, "t")).scripts[0])
    assert [part["name"] for part in parts] == ["Encoder self-attention", "Decoder self-attention", "Cross-attention"]
    for part, weights in zip(parts, (attention.encoder, attention.decoder, attention.cross), strict=True):
        read = torch.frombuffer(bytearray(base64.b64decode(part["weights"])), dtype=torch.uint8) / 255
        assert torch.allclose(read.view(weights.shape), weights, atol=1 / 500)
        assert (part["layers"], part["heads"]) == (2, 3)
        assert weights.shape[2:] == (len(part["queries"]), len(part["keys"]))


def test_nothing_is_loaded_from_elsewhere():
    text = attention_page(attention_with(["a"], ["b"]), "t")
    assert not re.search(r"https?:|//[a-z]|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttp", text)
    assert "default-src 'none'" in text


# In a browser
@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium isn't installed, which drives the browser")
    if CHROMIUM is None or not DRIVER.exists():
        pytest.skip("there is no Chromium with its driver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--window-size=1000,900",
    )  # fmt: skip
    for flag in (*flags, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER), env=dict(os.environ)))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a page from a file: the attention that is in it."""
    browser.get_log("performance")

    def open_page(attention):
        file = tmp_path / "page.html"
        file.write_text(attention_page(attention, "Attention: half past nine"), encoding="utf-8")
        browser.get(file.as_uri())
        return attention

    yield open_page
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    asked = {one["request"]["url"] for one in requests if one["documentURL"].startswith("file:")}
    assert asked == {(tmp_path / "page.html").as_uri()}  # others are of the browser's own first page
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def _texts(browser, selector):
    return [one.text for one in browser.find_elements("css selector", selector)]


def _expected(weights, query):
    """The percentages below the keys, from the weights of a head, (queries, keys)."""
    return ["" if value < 0.005 else f"{value:.0%}" for value in weights[query].tolist()]


def _near(shown, expected):
    """Weights are rounded twice, to a byte and to percent."""
    numbers = [[int(text.rstrip("%") or 0) for text in texts] for texts in (shown, expected)]
    return len(shown) == len(expected) and all(abs(a - b) <= 1 for a, b in zip(*numbers, strict=True))


@pytest.mark.browser
def test_a_token_shows_what_it_attends_to(browser, opened):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import Select

    attention = opened(attention_with(["half", "past", "nine", "</s>"], ["halb", "zehn", "</s>"]))
    assert browser.title == "Attention: half past nine"
    buttons = browser.find_elements("css selector", "#queries button")
    assert [button.text for button in buttons] == ["halb", "zehn", "</s>"]
    assert _texts(browser, "#keys span") == ["half", "past", "nine", "</s>"]

    # The mouse: the last layer, the mean of the heads.
    ActionChains(browser).move_to_element(buttons[1]).perform()
    assert _near(_texts(browser, "#keys small"), _expected(attention.cross[-1].mean(0), 1))
    assert [button.get_attribute("aria-pressed") for button in buttons] == ["false", "true", "false"]
    most = attention.source_pieces[attention.cross[-1].mean(0)[1].argmax()]
    assert browser.find_element("id", "said").text.startswith(f"zehn attends most to {most} (")

    # The selects.
    Select(browser.find_element("id", "layer")).select_by_visible_text("1")
    Select(browser.find_element("id", "head")).select_by_visible_text("3")
    assert _near(_texts(browser, "#keys small"), _expected(attention.cross[0, 2], 1))
    Select(browser.find_element("id", "part")).select_by_visible_text("Decoder self-attention")
    assert _texts(browser, "#keys span") == ["<s>", "halb", "zehn"]
    assert _near(_texts(browser, "#keys small"), _expected(attention.decoder[0, 2], 1))

    # The keyboard.
    browser.refresh()
    reached = []
    for _ in range(6):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        reached.append(browser.switch_to.active_element)
    assert [one.get_attribute("id") for one in reached[:3]] == ["part", "layer", "head"]
    assert [one.text for one in reached[3:]] == ["halb", "zehn", "</s>"]
    assert _near(_texts(browser, "#keys small"), _expected(attention.cross[-1].mean(0), 2))
    labels = [one.accessible_name for one in reached[:3]]
    assert labels == ["Attention", "Layer", "Head"]


@pytest.mark.browser
def test_hostile_and_many_tokens_are_shown_as_text(browser, opened):
    opened(attention_with([*HOSTILE, *ODD, *map(str, range(280))], [*HOSTILE, *map(str, range(30))]))
    assert browser.title == "Attention: half past nine"
    assert browser.find_elements("css selector", "img") == []
    assert _texts(browser, "#queries button")[0] == HOSTILE[0]
    assert len(browser.find_elements("css selector", "#keys span")) == len(HOSTILE) + len(ODD) + 280
    width = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert width <= 0
