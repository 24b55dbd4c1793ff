"""HTML: what is translated of it, and what stays byte for byte."""

import re
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_vanilla_transformer.translation.backend import Alignment, Translation
from hf_vanilla_transformer.translation.links import Linked, linked
from hf_vanilla_transformer.translation.markup import Document


def size(text: str) -> int:
    return len("".join(text.split()))


def link(text: str, size: int, origins: Iterable[int]) -> Linked:
    """Links each character of a text with one of the source, of `size` characters, or with none (-1)."""
    rows = np.array(list(origins))[:, None] == np.arange(size)
    ends = np.arange(1.0, size + 1), np.arange(1.0, len(rows) + 1)
    return Linked(text, (size, len(rows)), ((*ends, rows.astype(float)),))


def shout(source: str) -> str:
    """Translates each character into a capital at its place."""
    document = Document(source)
    return document.translated({text: link(text.upper(), size(text), range(size(text))) for text in document.texts})


def reordered(source: str, *words: tuple[str, str]) -> str:
    """Translates a single text by words, each with the word of the source that it comes from, or ""."""
    (text,) = (document := Document(source)).texts
    origins = [size(text[: text.index(of)]) if of else -1 for word, of in words for _ in word]
    return document.translated({text: link(" ".join(word for word, _ in words), size(text), origins)})


@pytest.mark.parametrize(
    ("source", "translated"),
    [
        ("two dogs", "TWO DOGS"),
        ("<p>two <b>big</b> dogs</p>", "<p>TWO <b>BIG</b> DOGS</p>"),
        ("<p>a<br>b</p>\n<ul><li>c <li>d</ul>", "<p>A<br>B</p>\n<ul><li>C <li>D</ul>"),
        ('<a href="x?a=1&amp;b=2">one</a>', '<a href="x?a=1&amp;b=2">ONE</a>'),
        ("fish &amp; chips &lt; &copy;", "FISH &amp; CHIPS &lt; ©"),
        ("<p>call <code>f(x &lt; y)</code> now</p>", "<p>CALL <code>f(x &lt; y)</code> NOW</p>"),
        ('<div translate="no">keep <b>it</b></div> not', '<div translate="no">keep <b>it</b></div> NOT'),
        ('say <span class="x notranslate">Name</span> now', 'SAY <span class="x notranslate">Name</span> NOW'),
        ("<script>if (a<b) x()</script><style>p {}</style>go", "<script>if (a<b) x()</script><style>p {}</style>GO"),
        ("see https://a.b/c?d=e. it", "SEE https://a.b/c?d=e. IT"),
        ("write to some.one@a.org, or {name} or {{ x.y }}", "WRITE TO some.one@a.org, OR {name} OR {{ x.y }}"),
        ("<!DOCTYPE html><!-- note --><title>t</title>", "<!DOCTYPE html><!-- note --><title>T</title>"),
        ("<b>open <i>both", "<b>OPEN <i>BOTH"),
        ("</b>x</p>", "</b>X</p>"),
        ("<img src=a> cat", "<img src=a> CAT"),
        ("  \n ", "  \n "),
        ("1<code> x</code>", "1<code> x</code>"),
        ("see <img class='notranslate' alt='a > b'> now", "SEE <img class='notranslate' alt='a > b'> NOW"),
        ("<p>a <svg x='1'/> b</p>c", "<p>A <svg x='1'/> B</p>C"),
        ("<svg><svg/></svg>b", "<svg><svg/></svg>B"),
        ("<div translate=no><!-- <div> -->K</div>b", "<div translate=no><!-- <div> -->K</div>B"),
        ("<div translate=no><img alt='<div>'>K</div>b", "<div translate=no><img alt='<div>'>K</div>B"),
        ("<ul><li translate=no>K<ul><li>k</ul><li>b</ul>c", "<ul><li translate=no>K<ul><li>k</ul><li>B</ul>C"),
        ("<ul><li translate=no>K</ul>c", "<ul><li translate=no>K</ul>C"),
        ("<tr><td class=notranslate>K<td>b<tr><td>c", "<tr><td class=notranslate>K<td>B<tr><td>C"),
    ],
)
def test_markup_stays(source: str, translated: str) -> None:
    assert shout(source) == translated


def test_white_space_is_that_of_a_browser() -> None:
    document = Document("<p>\n  two <b> dogs </b>\n  run\n</p>")
    assert document.texts == ["two dogs run"]
    assert shout("<p>\n  two <b> dogs </b>\n  run\n</p>") == "<p>\n  TWO <b>DOGS</b> RUN\n</p>"


def test_markup_follows_its_words() -> None:
    words = ("la", "the"), ("casa", "house"), ("roja", "red")
    assert reordered("<p>the <b>red</b> <i>house</i></p>", *words) == "<p>la <i>casa</i> <b>roja</b></p>"
    words = ("er", "he"), ("hob", "picked"), ("ihn", "it"), ("auf", "up")
    assert reordered("he <a href=x><i>picked</i> it up</a>", *words) == "er <a href=x><i>hob</i> ihn auf</a>"
    words = ("no", "not"), ("va", "go")  # two words without a counterpart
    assert reordered("<u>he</u> does <b>not</b> <i>go</i>", *words) == "<u></u><b>no</b> <i>va</i>"
    words = ("ich", "I"), ("habe", "have"), ("den", "dog"), ("Hund", "dog"), ("gesehen", "seen")
    assert reordered("I have<wbr> seen the <b>dog</b>", *words) == "ich habe<wbr> <b>den Hund</b> gesehen"


def test_what_stays_is_where_the_translation_has_it_or_its_words_are() -> None:
    assert reordered("call {name} now", ("ruf", "call"), ("jetzt", "now"), ("{name}", "")) == "ruf jetzt {name}"
    assert reordered("call {name} now", ("nun", "now"), ("{Name}", "{name}"), ("an", "call")) == "nun {name} an"
    assert reordered("call {name}, now", ("ruf", "call"), ("nun", "now")) == "ruf {name} nun"
    assert reordered("{name}, call", ("{name}님", "{name}"), ("전화", "call")) == "{name}님 전화"
    assert reordered("see {a} at www.a.de", ("请到www.a.de看{a}", "see")) == "请到www.a.de看{a}"
    link = '<a href="x"><span>https://</span><b>a.de</b>/?x=1&y=%s</a>'
    assert reordered(f"see {link}", ("https://a.de/?x=1&y=%s", ""), ("sieh", "see")) == f"{link} sieh"
    keep = "<b translate=no>in</b>"
    assert reordered(f"be {keep} it", ("innen", "it"), ("darin", "it"), ("in", "in")) == f"innen darin {keep}"


def test_a_text_of_unknown_tokens_keeps_its_order(tokenizer) -> None:
    alone = Alignment(("</s>",), ("</s>",), torch.ones(1, 1), (2,), (2,))
    found = linked(tokenizer, "ab cd", Translation("EFGH", 1, None, alone))
    assert found.shares(1, 4, np.array([0, 1]), np.array([1, 4])).tolist() == [0, 1]


@pytest.mark.parametrize("part", ["<!--", '<a "', "<pre ", "<b>", "<b>x", "a.b-", "www.", "{{"])
def test_hostile_markup_comes_back(part: str) -> None:
    source = part * (20_000 // len(part))
    assert Document(source).translated({}) == source


def test_hostile_markup_is_rendered_in_time() -> None:
    nested = "0"
    for number in range(1, 20):
        nested = f"<b>{nested}</b> <i>{100 + number}</i> {100 + number}"
    for source in (nested, "<a(b|b)*c translate=no><a" + "b" * 60, "<code>" + "<" * 40_000, "<b>1</b> " * 4_000):
        assert shout(source).count("<b>") == source.count("<b>")


TAGS = ["<b>", "</b>", "<p>", "</p>", "<br/>", "<code>x</code>", "{a}"]
PARTS = [*TAGS, "one ", "two", " ", "&amp;", "&#233;", "<", ">", "é"]


@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join))
def test_all_markup_comes_back(source: str) -> None:
    tags = re.compile(r"</?(?:b|p|br|code)/?>|\{a\}")
    assert sorted(tags.findall(shout(source))) == sorted(tags.findall(source))
