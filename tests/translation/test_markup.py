"""HTML: what is translated of it, and what stays byte for byte."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_vanilla_transformer.translation.markup import Document


def shout(source: str) -> str:
    """Translates each word into capitals, wherever it stands."""
    document = Document(source)
    return document.translated({text: text.upper() for text in document.texts})


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
    assert document.texts == ["two dogs run", "two", "dogs", "run"]
    assert document.translated({"two dogs run": "zwei hunde rennen", "dogs": "hunde"}) == (
        "<p>\n  zwei <b> hunde </b> rennen\n</p>"
    )


def test_markup_follows_its_words() -> None:
    document = Document("<p>the <b>red</b> <i>house</i></p>")
    order = {"the red house": "la casa roja", "red": "roja", "house": "casa", "the": "la"}
    assert document.translated(order) == "<p>la <i>casa</i> <b>roja</b></p>"


def test_what_is_not_found_once_keeps_the_order_of_the_source() -> None:
    document = Document("<p>a <b>dog</b> and a dog</p>")
    words = {"a dog and a dog": "hund und hund", "a": "ein", "dog": "hund", "and a dog": "und ein hund"}
    assert document.translated(words) == "<p>ein <b>hund</b> und ein hund</p>"


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


PARTS = st.sampled_from(
    [
        "one ",
        "two",
        " ",
        "&amp;",
        "&#233;",
        "<b>",
        "</b>",
        "<p>",
        "</p>",
        "<br/>",
        "<code>x</code>",
        "{a}",
        "<",
        ">",
        "é",
    ]
)


@given(st.lists(PARTS, max_size=12).map("".join))
def test_all_markup_comes_back(source: str) -> None:
    tags = re.compile(r"</?(?:b|p|br|code)/?>|\{a\}")
    assert sorted(tags.findall(shout(source))) == sorted(tags.findall(source))
