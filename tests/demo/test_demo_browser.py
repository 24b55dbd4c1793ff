"""The page in a browser: what a user types, sees and hears, with a mouse and without one."""

import json
import shutil
import time
from pathlib import Path

import pytest

webdriver = pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1200,1000",
)  # fmt: skip
PATIENCE = 120  # seconds
MATRIX, STATUS, SOURCE = ".vt-matrix", "[role=status]", "#source textarea"
# The name that a browser gives to an element, as a screen reader says it.
NAME = """
const one = arguments[0], by = one.getAttribute("aria-label");
return by || [...(one.labels || [])].map((label) => label.innerText).join(" ") || one.innerText || "";
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(DRIVER is None, reason="needs chromedriver and Chromium"),
    pytest.mark.timeout(900),
]


class User:
    """Someone at a browser."""

    def __init__(self, driver, address):
        self.driver, self.address = driver, address

    def open(self, query=""):
        self.driver.get(self.address + query)
        self.until(lambda: self.all(SOURCE) and self.all("fieldset[aria-label=Layer]"), "the page")
        return self

    def all(self, css):
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css):
        return self.all(css)[0]

    def until(self, condition, what):
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                if found := condition():
                    return found
            except Exception:  # an element that has just been replaced
                pass
            time.sleep(0.1)
        raise AssertionError(f"{what}: not after {PATIENCE} s; the page says {self.driver.page_source[-2000:]}")

    def type(self, text):
        box = self.one(SOURCE)
        box.send_keys(Keys.CONTROL + "a", Keys.DELETE)
        box.send_keys(text)

    def translate(self, text):
        """Types a text, presses the button, and waits for an answer; on a page that has one, it may be that."""
        self.type(text)
        self.one("#translate").click()
        self.until(lambda: self.status() and not self.all(".generating"), "an answer")
        return self.status()

    def status(self):
        return self.one(STATUS).text

    def say(self, what):
        self.until(lambda: what in self.status(), f"status {what!r}")

    def translations(self):
        return [one.get_attribute("value") for one in self.all("textarea[disabled], textarea[readonly]")]

    def captions(self):
        return [one.text for one in self.all(f"{MATRIX} caption")]

    def name(self, element):
        return self.driver.execute_script(NAME, element)

    def choose(self, group, label):
        self.one(f"fieldset[aria-label={group!r}] label[data-testid={f'{label}-radio-label'!r}]").click()


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('browser')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def user(driver, page):
    driver.get_log("performance"), driver.get_log("browser")
    return User(driver, page.address).open()


def asked_for(driver):
    """The addresses that the page has asked for, without the browser's own pages."""
    events = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    addresses = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    return [address for address in addresses if not address.startswith(("chrome:", "data:", "blob:"))]


def test_translate_and_see_the_matrix(user, page):
    assert user.translate("half past nine") == "Translated 1 line."
    user.until(lambda: len(user.all(MATRIX)) == 2, "two matrices")
    assert ["Cross-attention" in one for one in user.captions()] == [True, True]
    assert ["layer 2 of 2, mean of 4 heads" in user.captions()[0], "layer 2 of 3" in user.captions()[1]] == [True, True]
    assert len(set(user.translations())) == 2
    assert [len(table.find_elements(By.CSS_SELECTOR, "tbody tr")) for table in user.all(".vt-table")] == [4, 4]
    assert "natural logarithm" in user.one(".vt-table caption").text


def test_layer_head_kind_and_rank(user):
    user.translate("half past nine")
    user.until(lambda: user.all(MATRIX), "a matrix")
    user.choose("Layer", "1")
    user.until(lambda: all("layer 1 of" in one for one in user.captions()) and len(user.captions()) == 2, "layer 1")
    before = user.one(f"{MATRIX} tbody").text
    user.choose("Head", "3")
    user.until(lambda: all("head 3 of 4" in one for one in user.captions()), "head 3")
    assert user.one(f"{MATRIX} tbody").text != before
    for kind, said in (("Encoder", "Self-attention of the encoder"), ("Decoder", "Self-attention of the decoder")):
        user.choose("Attention", kind)
        user.until(lambda said=said: all(said in one for one in user.captions()), kind)
    user.choose("Attention", "Cross")
    user.until(lambda: "Cross" in user.captions()[0], "cross-attention")
    rows = [row.text for row in user.all(f"{MATRIX} tbody th")]
    user.choose("Rank of the translation", "4")
    user.until(lambda: [row.text for row in user.all(f"{MATRIX} tbody th")] != rows, "another translation")


def test_a_layer_that_one_of_two_has_not(user):
    user.translate("half past nine")
    user.choose("Layer", "3")
    user.until(lambda: len(user.captions()) == 1 and "layer 3 of 3" in user.captions()[0], "layer 3")
    assert any("There is no layer 3: this model has 2 layers there." in one.text for one in user.all(".vt-problem"))


def test_several_lines(user):
    user.translate("half past nine\n\nit costs two hundred")
    user.say("Translated 2 lines.")
    assert all(text.count("\n") == 2 for text in user.translations())
    user.choose("Layer", "1")
    user.until(lambda: user.all(MATRIX), "a matrix")
    first = [one.text for one in user.all(f"{MATRIX} thead th")]
    line = user.until(lambda: user.all("input[aria-label=Line]"), "the number of the line")[0]
    line.send_keys(Keys.ARROW_UP, Keys.ARROW_UP)
    user.until(lambda: user.all(MATRIX) and [one.text for one in user.all(f"{MATRIX} thead th")] != first, "line 3")
    line.send_keys(Keys.ARROW_DOWN)
    user.until(
        lambda: any("give the number of a line with text" in one.text for one in user.all(".vt-problem")), "line 2"
    )


def test_empty_text(user):
    user.translate("half past nine")
    user.until(lambda: user.all(MATRIX), "a matrix")
    user.type("")
    user.one("#translate").click()
    user.say("There is nothing to translate. Type a sentence into the text box first.")
    user.until(lambda: user.translations() == ["", ""] and not user.all(MATRIX), "an empty page")


def test_ten_thousand_characters(user):
    box = user.one(SOURCE)
    text = "half past nine. " * 625
    user.driver.execute_script(
        "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input', {bubbles: true}));", box, text
    )
    user.one("#translate").click()
    user.say("Translated 1 line.")
    assert all(user.translations())
    user.until(lambda: len(user.all(".vt-message.vt-problem")) == 2, "why there is no matrix")
    assert "tokens" in user.one(".vt-message.vt-problem").text
    user.translate("half past nine")
    user.until(lambda: len(user.all(MATRIX)) == 2, "the next translation")


def test_markup_is_text(user):
    user.translate("<img src=x onerror=broken=1>\n<b>${1+1}</b>{{value}}")
    user.until(lambda: len(user.all(MATRIX)) == 2, "matrices")
    assert user.driver.execute_script("return window.broken") is None
    assert user.all(".vt-matrix img, .vt-matrix b, .vt-table img, .vt-table b") == []
    assert {"<", ">", "="} <= {one.text for one in user.all(f"{MATRIX} thead th")}
    (line, *_) = user.all("input[aria-label=Line]")
    line.send_keys(Keys.ARROW_UP)
    user.until(lambda: {"$", "{", "}"} <= {one.text for one in user.all(f"{MATRIX} thead th")}, "line 2")


def test_examples(user):
    user.until(lambda: user.all(".gallery-item, button.gallery"), "examples")
    next(one for one in user.all("button") if one.text == "half past nine").click()
    user.until(lambda: user.one(SOURCE).get_attribute("value") == "half past nine", "the example")


def test_everything_has_a_name(user):
    user.translate("half past nine")
    user.until(lambda: user.all(".vt-scroll"), "tables")
    controls = user.all("input, textarea, select, button, [tabindex='0']")
    shown = [one for one in controls if one.is_displayed() or one.get_attribute("type") == "radio"]
    assert len(shown) > 15
    assert [one.get_attribute("outerHTML")[:200] for one in shown if not user.name(one).strip()] == []
    groups = [one.get_attribute("aria-label") for one in user.all("fieldset")]
    assert groups == ["Attention", "Layer", "Head", "Rank of the translation"]
    assert user.driver.execute_script("return document.documentElement.lang") == "en"
    assert user.driver.title.startswith("Translation by ")


def test_with_the_keyboard_alone(user):
    """Tab goes from the text through the options to the button, Enter and Ctrl+Enter translate, Space chooses."""
    driver = user.driver
    user.one(SOURCE).send_keys("half past nine")
    names = []
    for _ in range(12):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        names.append(user.name(driver.switch_to.active_element).splitlines()[0])
        if names[-1] == "Translate":
            break
    assert names == [
        "half past nine", "number input for Beams", "Reset to default value", "range slider for Beams",
        "Longest translation, in tokens", "Translate",
    ]  # fmt: skip
    assert driver.execute_script(
        "return getComputedStyle(document.activeElement).outlineStyle !== 'none' || "
        "getComputedStyle(document.activeElement).boxShadow !== 'none'"
    )
    driver.switch_to.active_element.send_keys(Keys.ENTER)
    user.say("Translated 1 line.")
    for _ in range(20):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        focused = driver.switch_to.active_element
        group = driver.execute_script("return arguments[0].closest('fieldset')?.getAttribute('aria-label')", focused)
        if (group, focused.get_attribute("value")) == ("Layer", "1"):
            break
    focused.send_keys(Keys.SPACE)
    user.until(lambda: len(user.captions()) == 2 and "layer 1 of" in user.captions()[0], "layer 1")
    user.one(SOURCE).send_keys(" 1", Keys.CONTROL + Keys.ENTER)
    user.until(lambda: "half past nine 1" in user.one(SOURCE).get_attribute("value"), "the text as it was typed")
    user.until(lambda: any("1" in one.text for one in user.all(f"{MATRIX} thead th")), "the new sentence's matrix")


def test_nothing_comes_from_elsewhere_and_nothing_fails(user, page, driver):
    user.translate("half past nine")
    addresses = asked_for(driver)
    assert len(addresses) > 5
    assert [address for address in addresses if not address.startswith(page.address)] == []
    assert [entry["message"] for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []


@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_is_wider_than_the_window(user, width):
    user.driver.set_window_size(width, 900)
    try:
        user.translate("half past nine, twenty-one, three euros")
        user.choose("Layer", "1")
        user.until(lambda: len(user.all(MATRIX)) == 2, "matrices")
        shown, inner = user.driver.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert shown <= inner
    finally:
        user.driver.set_window_size(1200, 1000)


def test_the_server_has_nothing_to_complain_about(user, page):
    user.translate("half past nine")
    log = Path(page.log).read_text()
    assert "Traceback" not in log, log[-3000:]
