"""HTML: what is translated of it, and what stays byte for byte."""

from collections.abc import Iterable
from xml.etree.ElementTree import Element

import html5lib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hf_vanilla_transformer.data.formats import CorpusError
from hf_vanilla_transformer.documents.links import Linked, linked
from hf_vanilla_transformer.documents.markup import Html
from hf_vanilla_transformer.translation.backend import Alignment, Translation
from tests.documents.linking import link, shouted, size


def shout(source: str, target: str | None = None) -> str:
    return shouted(Html(source, target))


def reordered(source: str, *words: tuple[str, str]) -> str:
    """Translates a single text by words, each with the word of the source that it comes from, or ""."""
    (text,) = (document := Html(source)).texts
    origins = [size(text[: text.index(of)]) if of else -1 for word, of in words for _ in word]
    return document.translated({text: link(" ".join(word for word, _ in words), origins, size(text))})


@pytest.mark.parametrize(
    ("source", "translated"),
    [
        ("two dogs", "TWO DOGS"),
        ("\ufefftwo dogs<br>", "\ufeffTWO DOGS<br>"),
        ("<p>\n  two <b> dogs </b>\n  run\n</p>", "<p>\n  TWO <b>DOGS</b> RUN\n</p>"),  # white space of a browser
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
        ("<b translate=no>K<p>k</b>b</p>c", "<b translate=no>K<p>k</b>B</p>C"),
        ("see <a href=x><img src=y></a> now", "SEE <a href=x><img src=y></a> NOW"),
        ("x <u><b></b><i></i></u> y", "X <u><b></b><i></i></u> Y"),
        ("<span translate=no>K<script>s</script></span> c", "<span translate=no>K<script>s</script></span> C"),
        ("<svg/><code>k</code> b <svg><style/></svg>c", "<svg/><code>k</code> B <svg><style/></svg>C"),
        # As html5lib reads it.
        ("<!-->a<p>b", "<!-->A<p>B"),
        ("<!--->a<p>b", "<!--->A<p>B"),
        ("<!-- c --!>a<p>b", "<!-- c --!>A<p>B"),
        ("a <!-- c -- > <p>b", "A <!-- c -- > <p>b"),
        ("</ p>a <3</>", "</ p>A &lt;3</>"),
        ("a<p class='x", "A<p class='x"),
        ("<script><!-- <script>s</script>s</script>a", "<script><!-- <script>s</script>s</script>A"),
        ("<svg><![CDATA[s>s]]></svg>a <![CDATA[s>b", "<svg><![CDATA[s>s]]></svg>A <![CDATA[s>B"),
        ("<title>a <b></title>c<plaintext>s</plaintext>", "<title>A &lt;B&gt;</title>C<plaintext>s</plaintext>"),
        ("a&ampb &notit; ho&shy;tel\r\nb\rc", "A&amp;B ¬IT; HOTEL B C"),
        ("<B>a</b> <B/>c", "<B>A</b> <B/>C"),
    ],
)
def test_markup_stays(source: str, translated: str) -> None:
    assert shout(source) == translated


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        ("half <acronym>past</acronym> <output>nine</output>", ["half past nine"]),
        ("go <x-y>on</x-y> <unknown>and <picture><source><img></picture>on</unknown>", ["go on and on"]),
        ("<ruby>dogs<rp>(</rp><rt>k</rt><rp>)</rp></ruby> run", ["dogs run"]),
        ("<noscript>turn <b>it</b> on</noscript> <iframe>k <b></iframe> now", ["turn it on now"]),
        ("show <select><optgroup label='x'><option>ten<option>all</select> rows", ["show rows", "x", "ten", "all"]),
        ("see <video>no <b>video</b></video> <object>none</object> now", ["see now", "no video", "none"]),
        ("a<template><p>b</template>", ["a", "b"]),
        ("<label>name<input></label><button>save <b>all</b></button><button>no</button>", ["name", "save all", "no"]),
        ("<div translate=no>k <b translate>a <code>k</code> b</b> k</div>", ["a k b"]),
        ("see <code>f(<i translate=yes>name</i>)</code> now", ["see f() now", "name"]),
        ("\ufeffgo on", ["go on"]),
        ("a<br>b<hr>c<summary>d</summary>e", ["a", "b", "c", "d", "e"]),
    ],
)
def test_what_is_one_text(source: str, texts: list[str]) -> None:
    assert Html(source).texts == texts
    assert shout(source).lower() == source


@pytest.mark.parametrize(
    ("source", "translated"),
    [
        ('<img alt=\'a "b"\' src=x title="it\'s">', '<img alt=\'A "B"\' src=x title="IT\'S">'),
        ("<P TITLE=it's title=k>", '<P TITLE="IT\'S" title=k>'),
        ("<a title='&quot;x&apos; > y'>b</a>", "<a title='\"X&#39; &gt; Y'>B</a>"),
        ("<code title='a {b}' class=c>k</code> e", "<code title='A {b}' class=c>k</code> E"),
        ("<pre aria-label=a>k</pre><svg aria-label=b />", '<pre aria-label="A">k</pre><svg aria-label="B" />'),
        ("<b translate=no title=k><i translate=yes title=a>", '<b translate=no title=k><i translate=yes title="A">'),
        ("<input placeholder='a' value=k>", "<input placeholder='A' value=k>"),
        ("<input type=button value='b'>", "<input type=button value='B'>"),
        ("<meta name=viewport content=k>", "<meta name=viewport content=k>"),
        ("<meta name=Description content='a'>", "<meta name=Description content='A'>"),
        ("<th abbr='a' alt='k'>b<td abbr='k'>c", "<th abbr='A' alt='k'>B<td abbr='k'>C"),
        ("<a title='a' title<b title= 'b'/x=\"'>'\"title='k'>", "<a title='A' title<b title= 'b'/x=\"'>'\"title='k'>"),
        ("<html lang=en-GB xml:lang='en'><p lang=en>a", "<html lang=\"de\" xml:lang='de'><p lang=en>A"),
    ],
)
def test_attributes(source: str, translated: str) -> None:
    assert shout(source, "de") == translated


def test_a_page_says_its_language_and_where_its_texts_are() -> None:
    page = Html("<!doctype html>\r\n<html lang='en-GB'>\n<p>\n a <b>dog</b>\n<p title='a dog'>b\n<p>b")
    assert (page.language, page.texts) == ("en-GB", ["a dog", "b"])
    assert page.places == {"a dog": [4, 5], "b": [5, 6]}
    assert Html("<html lang=''><p lang=fr>").language is None
    assert shout("<html lang=''><html lang=en><p lang=fr>", "de") == "<html lang='de'><html lang=\"de\"><p lang=fr>"
    assert shout("<html lang=en translate=no>k", "de") == "<html lang=en translate=no>k"


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


def test_a_text_of_unknown_tokens_keeps_its_order(tiny_checkpoint) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    alone = Alignment(("</s>",), ("</s>",), torch.ones(1, 1), (2,), (2,))
    found = linked(tokenizer, "ab cd", Translation("EFGH", 1, None, alone))
    assert found.shares(1, 4, np.array([0, 1]), np.array([1, 4])).tolist() == [0, 1]


@pytest.mark.parametrize("part", ["<!--", '<a "', "<pre ", "<p>x<b>y</b>", "a.b-", "www.", "{{", "<table><svg><html>"])
def test_hostile_markup_comes_back(part: str) -> None:
    source = part * (20_000 // len(part))
    assert Html(source).translated({}) == source


def test_hostile_markup_is_refused_or_rendered_in_time() -> None:
    for part in ("<b>", "<div>x"):  # which are never closed
        with pytest.raises(CorpusError, match="HTML has more than 512 elements inside one another"):
            Html(part * 20_000)
    nested = "0"
    for number in range(1, 20):
        nested = f"<b>{nested}</b> <i>{100 + number}</i> {100 + number}"
    for source in (nested, "<a(b|b)*c translate=no><a" + "b" * 60, "<code>" + "<" * 40_000, "<b>1</b> " * 4_000):
        assert shout(source).count("<b>") == source.count("<b>")


NAMES = (
    "a b p ul li table tr td select option ruby rt script title textarea svg math video template img code custom-x html"
)
FORMS = ("<{}>", "<{} title=one>", "<{} translate=no>", "<{} translate>", "<{} a='>' b/>", "</{}>", "</{}\n>")
TAGS = [form.format(name) for form in FORMS for name in NAMES.split()]
ODD = ["<!-->", "<!-- - --!>", "<!--", "</>", "</ x>", "<3 ", "<![CDATA[", "]]>", "<a '", "\r\n", "&amp; ", "&copy "]
SOUPS = st.lists(st.sampled_from([*TAGS, *ODD]) | st.sampled_from(["one ", " two ", "é{a} "]), max_size=12).map("".join)


@given(SOUPS)
def test_nothing_is_lost_and_nothing_moves(source: str) -> None:
    taken = []
    take, Html._take = Html._take, lambda self, raw, *rest: (taken.append(raw), take(self, raw, *rest))
    try:
        document = Html(source)
    finally:
        Html._take = take
    assert "".join(source[begin:end] for begin, end in taken) == source
    assert document.translated({text: Linked(text) for text in document.texts}) == source
    assert tree(shout(source)) == tree(source)


def tree(source: str) -> list[str]:
    """Returns what html5lib reads, without the case of letters and white space."""
    return "".join(parts(html5lib.parse(source))).upper().split()


def parts(element: Element) -> Iterable[str]:
    yield f" <{element.tag} {sorted(element.attrib.items())}> "
    yield from (
        "".join(text.split()) if isinstance(text, str) else "".join(parts(text))
        for text in [element.text or "", *(one for child in element for one in (child, child.tail or ""))]
    )
    yield " </> "
