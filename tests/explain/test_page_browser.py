"""The page in Chromium, from a file: it computes what PyTorch computes, every switch works, and it loads nothing."""

import json

import pytest
import torch

pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from small_models import TEXTS, assert_logits, assert_same_hypotheses, logits_of, model_with

from hf_vanilla_transformer.checkpoints.loading import load_checkpoint
from hf_vanilla_transformer.explain.page import model_page
from hf_vanilla_transformer.interop.convert import convert
from tests.chromium import MARKS, chromium, until
from tests.interop.ctranslate2_origins import ALL, ORIGINS, argos, sharpened

HOSTILE = "</script><img src=x onerror=document.title='broken'> <!--<b>${1} {{data}}"
SECTIONS = ("tokens", "embeddings", "encoder", "decoder", "cross", "softmax", "beam", "forcing", "attribution")

pytestmark = MARKS


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture
def model(tokenizer):
    model = model_with(tokenizer)
    model.generation_config.max_extra_length = 4
    return model


@pytest.fixture
def show(browser, tmp_path):
    """Opens a page from a file; by the end of the test it has logged no error and requested nothing else."""
    file = tmp_path / "page.html"

    def open_page(page):
        file.write_text(page, encoding="utf-8")
        browser.get_log("performance")
        browser.get_log("browser")
        browser.get(file.as_uri())
        return browser

    yield open_page
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
    asked = {one["request"]["url"] for one in requests if one["documentURL"].startswith("file:")}
    assert asked == {file.as_uri()}
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.fixture
def opened(show, model, tokenizer):
    """The page of a small model."""
    return show(model_page(model, tokenizer, "A & B </title>", [*TEXTS[2:5], HOSTILE]))


def set_screen(browser, width, height, scale=1, scheme="light"):
    """A screen and the colours that its user prefers, until the test ends."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": scale > 1}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def find(browser, css):
    (element,) = browser.find_elements(By.CSS_SELECTOR, css)
    return element


def texts(browser, css):
    """What elements show; asked at once, as views may be drawn again in between."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)", css
    )


def numbers(browser, css, count=None):
    """The numbers that the first `count` elements show; those in percent are parts of 1."""
    shown = [one.replace("−", "-") for one in texts(browser, css)[:count]]
    return [float(one.rstrip("%")) / (100 if one.endswith("%") else 1) for one in shown]


def open_sections(browser, *names):
    for name in names or SECTIONS:
        browser.execute_script(f"document.getElementById('{name}').open = true")
    if not names:
        until(lambda: browser.find_elements(By.ID, "attribution-table"))


def force(browser, text):
    """Gives a reference to the section of teacher forcing."""
    until(lambda: texts(browser, "#reference"))
    script = "const box = document.getElementById('reference'); box.value = arguments[0];"
    browser.execute_script(f"{script} setTimeout(() => box.dispatchEvent(new Event('change')))", text)


def type_and_translate(browser, text):
    browser.execute_script("document.getElementById('source').value = arguments[0]", text)
    find(browser, "#translate").click()


def computed(browser):
    """Logits, hypotheses and ids of the run that is shown."""
    return browser.execute_script(
        "return {ids: app.ids, target: app.target, logits: app.run.logits.map((row) => Array.from(row)),"
        "found: app.run.search.found.map(({tokens, score}) => ({tokens, score}))}"
    )


def check(browser, model, tokenizer, text, start=1):
    type_and_translate(browser, text)
    result, batch = computed(browser), tokenizer(text, return_tensors="pt")
    assert result["ids"] == batch["input_ids"][0].tolist()
    assert_logits(result["logits"], logits_of(model, result["ids"], [start, *result["target"][:-1]]))
    assert_same_hypotheses(model, batch, result["found"])
    best = tokenizer.decode(result["found"][0]["tokens"], skip_special_tokens=True)
    assert browser.execute_script("return document.getElementById('translation').textContent") == (best or "—")


def test_translations_and_logits_are_those_of_pytorch(opened, model, tokenizer):
    assert opened.title == find(opened, "h1").text == "A & B </title>"
    for text in [*TEXTS, HOSTILE]:
        check(opened, model, tokenizer, text)
    pieces = tokenizer.readable_pieces(tokenizer(HOSTILE)["input_ids"])
    assert texts(opened, "#overview .key .token")[-3:] == pieces[-3:]
    assert opened.find_elements(By.CSS_SELECTOR, "img, main b") == []


@pytest.mark.parametrize("name", ["argos", "opus_mt"])
def test_a_converted_model(show, name, tmp_path):
    """Its tokens, logits, probabilities and translations are those of Python, and it has targets of its own tokens."""
    folder = argos(tmp_path) if name == "argos" else sharpened(ORIGINS[name](tmp_path))
    convert(folder, tmp_path / "converted")
    tokenizer, model = load_checkpoint(tmp_path / "converted")
    model.generation_config.max_new_tokens = 12
    browser = show(model_page(model, tokenizer, name, ALL[:2]))
    start = model.generation_config.decoder_start_token_id
    for text in [*ALL[:5], "Odd:  «é» ﬁ ½ 漢字 🙂 </b>"]:
        check(browser, model, tokenizer, text, start)
    ids = tokenizer("Odd:  «é» ﬁ ½ 漢字 🙂 </b>")["input_ids"]
    assert texts(browser, "#overview .key .token") == [one.strip() for one in tokenizer.convert_ids_to_tokens(ids)]
    open_sections(browser, "softmax", "forcing")
    until(lambda: texts(browser, "#softmax td.bar .number"))
    probabilities = logits_of(model, ids, [start])[0].softmax(-1)
    shown = numbers(browser, "#softmax td.bar .number")
    assert shown == pytest.approx(probabilities.topk(10).values.tolist(), abs=0.0051)
    force(browser, ALL[12])
    target = tokenizer(text_target=ALL[12])["input_ids"]
    until(lambda: browser.execute_script("return app.forced().targets") == target)


def test_a_browser_that_reads_other_tokens_shows_no_model(show, model, tokenizer):
    page = model_page(model, tokenizer, "title", TEXTS[:1])
    ids = tokenizer("  two  spaces ")["input_ids"]
    sample, other = (json.dumps(["  two  spaces ", own]).removesuffix("]") for own in (ids, ids[1:]))
    assert page.count(sample) == 1
    browser = show(page.replace(sample, other))
    assert "This browser reads “  two  spaces ”" in browser.execute_script("return app.problem")
    assert browser.find_elements(By.ID, "translation") == []


SWITCHES = {
    "positions": {"positions": False}, "causal": {"causal": False}, "residual": {"residual": False},
    "scaled": {"scaled": False}, "norm": {"norm": "pre"}, "off": {"off": {"part": "encoder", "layer": 1, "head": 2}},
}  # fmt: skip


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_shows_both_translations_and_logits_at_once(opened, compute, model, tokenizer, name):
    """As node computes them, where tests/explain/test_compute.py compares with PyTorch."""

    def turn(value):
        if name in ("norm", "off"):
            Select(find(opened, f"#switch-{name}")).select_by_value(value)
        else:
            find(opened, f"#switch-{name}").click()

    before, target = find(opened, "#translation").text, computed(opened)["target"]
    turn({"norm": "pre", "off": "encoder-1-2"}.get(name))
    case = {"text": TEXTS[2], "target": [1, *target[:-1]], "options": SWITCHES[name], "plan": {"beams": [4]}}
    (expected,) = compute(model, tokenizer, [case])
    until(lambda: texts(opened, "#switched") != ["…"])
    assert find(opened, "#translation").text == before
    assert find(opened, "#switched").text == (expected["beams4"][0]["text"] or "—").strip()
    torch.testing.assert_close(torch.tensor(computed(opened)["logits"]), torch.tensor(expected["logits"]))
    shown = numbers(opened, "#switches .best:last-child td:last-child")
    assert shown == pytest.approx(torch.tensor(expected["logits"][0]).topk(10).values.tolist(), abs=0.0051)
    turn("")
    assert opened.find_elements(By.ID, "switched") == []


def test_equation_1_is_in_the_models_numbers(opened, model, tokenizer):
    open_sections(opened)
    Select(find(opened, "#cross-layer")).select_by_visible_text("2")
    find(opened, "#cross-head-1").click()
    find(opened, "#overview-1").click()
    result = computed(opened)
    with torch.no_grad():
        outputs = model(
            input_ids=torch.tensor([result["ids"]]), decoder_input_ids=torch.tensor([[1, *result["target"][:-1]]]),
            output_attentions=True,
        )  # fmt: skip
    weights = outputs.cross_attentions[1][0, 1, 1]
    assert numbers(opened, "#cross td.bar .number") == pytest.approx(weights.tolist(), abs=0.0051)
    masked = texts(opened, "#decoder tr.masked td:nth-of-type(3)")
    assert masked == ["−∞ (mask)"] * (len(result["target"]) - 2)  # of the second position


def test_the_tree_has_every_step_and_the_best_hypothesis(opened, model, tokenizer):
    open_sections(opened)
    batch = tokenizer(TEXTS[2], return_tensors="pt")
    options = {"num_return_sequences": 4, "return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(**batch, **options).sequences_scores.tolist()
    assert numbers(opened, "#beam tbody td:last-child") == pytest.approx(expected, abs=0.00051)
    best = computed(opened)["found"][0]["tokens"]
    assert len(opened.find_elements(By.CSS_SELECTOR, "#beam .node.best")) == len(best) + 1
    opened.execute_script("const s = document.getElementById('step'); s.value = 1; s.dispatchEvent(new Event('input'))")
    assert len(opened.find_elements(By.CSS_SELECTOR, "#beam .node")) == 1 + 8
    find(opened, "#play").click()
    until(lambda: texts(opened, "#play") == ["Play"] and "Step 1 " not in texts(opened, "#beam")[0])
    Select(find(opened, "#beams")).select_by_value("1")
    greedy = model.generate(**batch, num_beams=1, early_stopping=False)[0, 1:].tolist()
    assert computed(opened)["found"][0]["tokens"] == greedy


def test_figure_1_opens_the_section_of_a_box(opened):
    for number, name in enumerate(texts(opened, "#figure a")):
        find(opened, f"#figure a:nth-of-type({number + 1})").click()
        section = opened.switch_to.active_element.find_element(By.XPATH, "..")
        assert section.get_attribute("open"), name
    open_names = {one.get_attribute("id") for one in opened.find_elements(By.CSS_SELECTOR, "main > details[open]")}
    assert open_names == {*SECTIONS} - {"attribution"}


def test_a_tree_of_twelve_steps_fits_a_laptop(opened):
    set_screen(opened, 1280, 800)
    opened.execute_script("Object.assign(app.state.plan, {limit: ['max_new_tokens', 12], ends: [-1]}); app.search({})")
    open_sections(opened)
    assert "Step 12 of 12" in texts(opened, "#beam")[0]
    widths = "const one = document.querySelector('#beam .scroll'); return [one.scrollWidth, one.clientWidth]"
    scrolled, shown = opened.execute_script(widths)
    assert scrolled <= shown


def test_teacher_forcing_is_beside_free_running(opened, model, tokenizer):
    open_sections(opened)
    result, targets = computed(opened), tokenizer("halb zehn")["input_ids"]
    force(opened, "halb zehn")
    until(lambda: opened.execute_script("return app.forced().targets") == targets)
    inputs = [1, *targets[:-1]]
    logits = logits_of(model, result["ids"], inputs)
    length = len(inputs)
    assert texts(opened, "#forcing-table td:nth-child(1)")[:length] == ["<s>", *tokenizer.readable_pieces(inputs)[1:]]
    predicted = tokenizer.readable_pieces(logits.argmax(-1).tolist())
    assert texts(opened, "#forcing-table td:nth-child(2)")[:length] == predicted
    right = logits.softmax(-1)[range(length), targets].tolist()
    assert numbers(opened, "#forcing-table td:nth-child(3)", length) == pytest.approx(right, abs=0.0051)
    free = model.generate(torch.tensor([result["ids"]]), num_beams=1, early_stopping=False)[0, 1:].tolist()
    assert texts(opened, "#forcing-table td:nth-child(4)")[: len(free)] == tokenizer.readable_pieces(free)


def test_attribution_leaves_each_source_token_out(opened, model, tokenizer):
    open_sections(opened)
    result = computed(opened)
    place, inputs = result["target"][0], [1, *result["target"][:-1]]

    def log_probability(ids):
        return logits_of(model, ids, inputs)[0].log_softmax(-1)[place].item()

    ids = result["ids"]
    expected = [log_probability(ids) - log_probability(ids[:n] + ids[n + 1 :]) for n in range(len(ids) - 1)]
    assert numbers(opened, "#attribution-table td:last-child .number") == pytest.approx(expected, abs=0.0051)


def test_the_tour_the_keyboard_and_the_languages(opened):
    find(opened, "#tour-start").click()
    for step in range(1, 7):
        assert f"Step {step} of 6" in find(opened, "#tour").text
        assert len(opened.find_elements(By.CSS_SELECTOR, ".toured")) == 1
        opened.switch_to.active_element.send_keys(Keys.ENTER)  # "Next" has the focus
    assert opened.find_elements(By.ID, "tour") == []
    find(opened, "#tour-start").click()
    find(opened, "#tour-skip").click()
    assert opened.find_elements(By.ID, "tour") == []

    find(opened, "#overview-0").send_keys(Keys.ARROW_DOWN)
    assert opened.switch_to.active_element.get_attribute("id") == "overview-1"
    assert find(opened, "#overview-1").get_attribute("aria-pressed") == "true"
    nameless = "return [...document.querySelectorAll('button, input, select, canvas, svg[role]')].filter((one) => "
    nameless += "!one.textContent && !one.ariaLabel && !one.labels?.length).map((one) => one.outerHTML)"
    open_sections(opened)
    assert opened.execute_script(nameless) == []

    find(opened, "#language").click()
    assert find(opened, "html").get_attribute("lang") == "zh-Hans"
    assert "束搜索" in find(opened, "#beam").text
    assert find(opened, "#language").text == "English"


def test_what_cannot_be_translated_is_said(opened):
    type_and_translate(opened, "  ")
    assert "nothing to translate" in find(opened, "#problem").text
    type_and_translate(opened, "nine " * 200)
    assert "the page takes up to 100" in find(opened, "#problem").text
    type_and_translate(opened, "nine")
    assert find(opened, "#problem").text == ""


def test_no_text_is_longer_than_learned_positions(show, tokenizer):
    model = model_with(tokenizer, position_encoding="learned", max_position_embeddings=12)
    browser = show(model_page(model, tokenizer, "learned"))  # without an example
    type_and_translate(browser, "nine " * 12)
    assert texts(browser, "#problem")[0].endswith("the page takes up to 12. Type a shorter one.")
    check(browser, model, tokenizer, "nine")
    assert len(computed(browser)["target"]) <= 11
    open_sections(browser, "forcing")
    force(browser, "nine " * 20)
    until(lambda: "the model has 12 positions" in texts(browser, "#problem")[0])
    browser.get_log("browser")  # it has logged that error


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(opened, scheme):
    set_screen(opened, 360, 740, 2, scheme)
    opened.execute_script("document.getElementById('switch-positions').click()")
    open_sections(opened)
    assert opened.execute_script("return document.documentElement.scrollWidth") <= 360
    background = opened.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (int(background.split("(")[1].split(",")[0]) < 60) == (scheme == "dark")
