"""The page's functions, without a server: tables, limits, models, and what it is made of."""

import re
from html.parser import HTMLParser

import gradio as gr
import pytest
import torch

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.demo import page as demo_page
from hf_vanilla_transformer.demo.local import translated_by
from hf_vanilla_transformer.demo.models import MOST_TOKENS_SHOWN, Candidate, Matrix, Model, described, load
from hf_vanilla_transformer.demo.page import MOST_CHARACTERS, MOST_LINES, NOTHING, build_page
from hf_vanilla_transformer.demo.server import OPEN, check_address
from hf_vanilla_transformer.demo.tables import attention_table, candidates_table, message, visible

NASTY = "<img src=x onerror=\"alert('1')\"> & ${1 + 1} {{value}}"


class Tags(HTMLParser):
    """The tags and the text of a piece of HTML."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def model(translate=None, attend=None, name="m", layers=(2, 3)):
    return Model(name, "tiny", "Score: something.", 4, layers, (4, 4), translate, attend)


def matrix(rows=("a", "b"), columns=("c", "d", "e"), layers=2, heads=3):
    weights = torch.rand(layers, heads, len(rows), len(columns))
    return Matrix(rows, columns, weights / weights.sum(-1, keepdim=True))


@pytest.fixture(scope="module")
def local(tiny_checkpoint):
    return translated_by("tiny", Translator(tiny_checkpoint))


# ---- Tables ----
def test_text_in_tables_is_text():
    tables = [
        message(NASTY),
        candidates_table(model(name=NASTY), [(1, [Candidate(NASTY, 3, -1.0)])]),
        attention_table(matrix([NASTY, "b"], ["</td><script>", "d"]), 1, 0, NASTY),
    ]
    allowed = {"p", "div", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    for table in tables:
        found = Tags(table)
        assert found.tags <= allowed
        assert "<img" in found.text or "<script" in found.text
        assert "<img" not in table


def test_the_list_of_candidates():
    one = candidates_table(model(), [(1, [Candidate("ja", 2, -0.25), Candidate("ja ja", 3, -1.0)])])
    assert [">−0.250<" in one, ">−1.000<" in one, ">Line<" in one] == [True, True, False]
    assert "has no score" not in one
    assert "Score: something." in one
    two = candidates_table(model(), [(1, [Candidate("ja", 2, -0.25)]), (3, [Candidate("nein")])])
    assert re.findall(r'number">(\d+|–|−[\d.]+)</td>', two) == ["1", "1", "−0.250", "2", "3", "1", "–", "–"]
    assert "has no score" in two


def test_a_matrix_has_the_weights_in_per_cent_and_says_what_it_is():
    weights = torch.tensor([[[[0.1, 0.2, 0.7], [1.0, 0.0, 0.0]], [[0.3, 0.4, 0.3], [0.0, 0.0, 1.0]]]])
    own = Matrix(["a", "b"], ["c", "d", "e"], weights)
    first = attention_table(own, 1, 1, "Cross")
    assert re.findall(r">(\d+)</td>", first) == ["10", "20", "70", "100", "0", "0"]
    assert first.count("vt-dark") == 2
    assert "<caption>Cross, layer 1 of 1, head 1 of 2, in per cent of each row.</caption>" in first
    mean = attention_table(own, 1, 0, "Cross")
    assert re.findall(r">(\d+)</td>", mean) == ["20", "30", "50", "50", "0", "50"]
    assert "mean of 2 heads" in mean


@pytest.mark.parametrize(
    ("layer", "head", "complaint"), [(3, 0, "no layer 3"), (0, 0, "no layer 0"), (1, 4, "no head 4")]
)
def test_a_matrix_that_is_not_there(layer, head, complaint):
    with pytest.raises(ValueError, match=complaint):
        attention_table(matrix(), layer, head, "x")


def test_tokens_that_cannot_be_seen():
    assert [visible(piece) for piece in ("▁the", " ", "\n", "\u200b", "", "x" * 30)] == [
        "▁the", "␣", "·", "·", "∅", "x" * 23 + "…"
    ]  # fmt: skip


# ---- What is asked for ----
@pytest.mark.parametrize(
    ("text", "beams", "longest", "complaint"),
    [
        ("", 4, 0, NOTHING),
        (" \n\t ", 4, 0, NOTHING),
        (None, 4, 0, NOTHING),
        ({"path": "/etc/passwd"}, 4, 0, NOTHING),
        ("a" * (MOST_CHARACTERS + 1), 4, 0, "20,001 characters; at most 20,000"),
        ("a\n" * MOST_LINES + "a", 4, 0, "101 lines; at most 100"),
        ("a", 0, 0, "Beams: give an integer from 1 to 10"),
        ("a", 11, 0, "Beams: give"),
        ("a", 1.5, 0, "Beams: give"),
        ("a", None, 0, "Beams: give"),
        ("a", float("nan"), 0, "Beams: give"),
        ("a", float("inf"), 0, "Beams: give"),
        ("a", True, 0, "Beams: give"),
        ("a", 4, 513, "Longest translation: give an integer from 1 to 512"),
        ("a", 4, -1, "Longest translation: give"),
        ("a", 4, "9", "Longest translation: give"),
    ],
)
def test_what_is_refused_before_any_work(text, beams, longest, complaint):
    def never(*_):
        raise AssertionError("it was translated")

    status, found, *rest = demo_page._translate([model(never)], text, beams, longest)
    assert complaint in Tags(status).text
    assert found == []
    assert rest[2:] == ["", ""]


def test_lines_keep_their_numbers_and_empty_ones_stay_empty():
    def translate(lines, beams, longest):
        assert (beams, longest) == (2, None)
        return [[Candidate(f"<{line}>", 1, -1.0), Candidate("other", 1, -2.0)] if line else [] for line in lines]

    asked = "one\r\n\rthree\nfour\n\n"
    status, found, line, rank, best, table = demo_page._translate([model(translate)], asked, 2, 0)
    assert Tags(status).text == "Translated 3 lines."
    assert best == "<one>\n\n<three>\n<four>"
    assert [(number, text) for number, text, _ in found] == [(1, "one"), (3, "three"), (4, "four")]
    assert (line.value, line.visible, [value for _, value in rank.choices]) == (1, True, [1, 2])
    assert "&lt;three&gt;" in table


@pytest.mark.parametrize("error", [ValueError("no\nsecond line"), RuntimeError("boom"), MemoryError()])
def test_an_error_of_a_model_is_one_line(error, caplog):
    def fail(*_):
        raise error

    status, found, *_ = demo_page._translate(
        [model(lambda *_: [[Candidate("ja")]]), model(fail, name="bad")], "a", 4, 0
    )
    text = Tags(status).text
    assert text.startswith("bad can't translate this: ")
    assert "second" not in text
    assert found == []
    assert ("boom" in caplog.text) == (isinstance(error, RuntimeError))  # in the server's log with its traceback


def test_attention_is_each_models_own():
    asked = []

    def attend(source, target):
        asked.append((source, target))
        return {"cross": matrix(layers=2), "encoder": matrix(), "decoder": matrix()}

    found = [(2, "two", [[Candidate("zwei"), Candidate("zwo")], [Candidate("deux")]])]
    models = [model(name="A"), model(name="B")]

    def show(line=2, rank=1, kind="cross", layer=2, head=0, found=found):
        return [
            Tags(one).text for one in demo_page._show(models, [attend, attend], found, line, rank, kind, layer, head)
        ]

    assert all("layer 2 of 2" in one for one in show())
    assert asked == [("two", "zwei"), ("two", "deux")]
    first, second = show(rank=2)
    assert first.startswith("A: Cross-attention")
    assert second == "B has found 1 translations of this line."
    assert show(layer=3)[0] == "There is no layer 3: this model has 2 layers there."
    assert "give the number of a line with text, from 2 to 2" in show(line=1)[0]
    assert show(found=[]) == ["Attention is shown here after a translation."] * 2


# ---- Models ----
def test_with_and_without_the_package_the_page_shows_the_same(tiny_checkpoint, local):
    plain = load("tiny", str(tiny_checkpoint))
    lines = ["half past nine", "", "three euros and five cents"]
    for beams, longest in ((4, None), (1, None), (3, 5)):
        ours, theirs = local.translate(lines, beams, longest), plain.translate(lines, beams, longest)
        for own, other in zip(ours[::2], theirs[::2], strict=True):
            assert [one.text for one in own] == [one.text for one in other]
            if beams > 1:
                assert [one.tokens for one in own] == [one.tokens for one in other]
                assert [one.score for one in own] == pytest.approx([one.score for one in other], abs=1e-4)
    ours, theirs = local.attend("half past nine", "halb zehn"), plain.attend("half past nine", "halb zehn")
    assert list(ours) == list(theirs) == ["encoder", "decoder", "cross"]
    for kind in ours:
        assert (ours[kind].rows, ours[kind].columns) == (theirs[kind].rows, theirs[kind].columns)
        torch.testing.assert_close(ours[kind].weights, theirs[kind].weights)
    assert (local.about, local.scoring, local.layers) == (plain.about, plain.scoring, plain.layers)


def test_what_a_model_is_said_to_be(local):
    assert local.about.endswith("2 + 2 layers, 4 heads, d_model 32")
    assert "((5 + tokens) / 6)^0.6" in local.scoring
    assert (local.num_beams, local.layers, local.heads) == (4, (2, 2), (4, 4))


@pytest.mark.parametrize(
    ("power", "said"), [(2.0, "divided by tokens^2."), (None, "divided by tokens^1."), (0.0, "logarithm). The nearer")]
)
def test_what_the_score_of_another_model_is(tiny_checkpoint, power, said):
    other = Translator(tiny_checkpoint).model
    other.generation_config.gnmt_length_penalty, other.generation_config.length_penalty = None, power
    assert said in described("x", other, None, None).scoring


def test_too_long_for_a_matrix(tiny_checkpoint, local):
    text = "half past nine " * 20
    for one in (local, load("tiny", str(tiny_checkpoint))):
        with pytest.raises(ValueError, match=f"up to {MOST_TOKENS_SHOWN} tokens"):
            one.attend(text, "halb zehn")
        with pytest.raises(ValueError, match=f"up to {MOST_TOKENS_SHOWN} tokens"):
            one.attend("halb zehn", text)


def test_ten_thousand_characters_on_a_line(tiny_checkpoint, local):
    line = "half past nine. " * 625
    ((only,),) = local.translate([line], 2, 3)
    assert only.score is None
    with pytest.raises(ValueError, match=r"begins with 'half past.*tokens, and 1,024 are the most; divide it"):
        load("tiny", str(tiny_checkpoint)).translate(["fine", line], 2, 3)


# ---- The page ----
def test_the_page_has_nothing_that_takes_or_shows_files(local):
    page = build_page([local], ["half past nine"])
    kinds = {type(block) for block in page.blocks.values()}
    layout = {gr.Row, gr.Column, gr.Blocks}
    assert kinds - layout <= {gr.Textbox, gr.Slider, gr.Number, gr.Button, gr.HTML, gr.Radio, gr.State, gr.Dataset} | {
        kind for kind in kinds if kind.__name__ == "Form"
    }
    assert page.analytics_enabled is False


def test_a_page_needs_a_model():
    with pytest.raises(ValueError, match="at least one model"):
        build_page([])


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd", "/file=/etc/passwd", "/gradio_api/file/etc/passwd", "/gradio_api/upload",
        "/gradio_api/proxy=http://example.org", "/monitoring", "/gradio_api/vibe-edit", "/gradio_api/run/translate",
        "/gradio_api/stream/a/0/1/playlist-file", "/gradio_api/component_server", "/gradio_api/mcp/", "/login",
    ],
)  # fmt: skip
def test_paths_that_are_closed(path):
    assert not OPEN.fullmatch(path)


def test_an_address_that_is_not_ours():
    with pytest.raises(OSError, match=r".+"):
        check_address("192.0.2.1", None)
