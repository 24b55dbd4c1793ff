"""Translating HTML: each block's text is translated as one, and its markup goes where the model's attention leads.

An inline element goes around the words that attend to its own, in one place. Code, what must not be translated,
addresses and placeholders come back byte for byte: where the translation has them, else in place of the words that
attend to them, else where their neighbours are. Markup is never lost.
"""

import html
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import regex
from numpy.typing import NDArray

from .links import Linked, Numbers, translate_linked
from .translator import Translator

VOID = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
}  # fmt: skip
INLINE = {
    "a", "abbr", "b", "bdi", "bdo", "big", "button", "cite", "code", "data", "del", "dfn", "em", "font", "i", "img",
    "input", "ins", "kbd", "label", "mark", "math", "nobr", "q", "s", "samp", "small", "span", "strike", "strong",
    "sub", "sup", "svg", "time", "tt", "u", "var", "wbr", "",  # comments
}  # fmt: skip
RAW = {"script", "style", "textarea"}  # elements without tags inside
CODE = RAW | {"code", "kbd", "math", "pre", "samp", "svg", "var"}  # what isn't prose
# Elements without an end tag end before the next of these, and with the list or table that they are in.
CELLS, TERMS, LISTS = frozenset({"td", "th", "tr"}), frozenset({"dt", "dd"}), {"dl", "ol", "select", "table", "ul"}
CLOSED_BY = {
    "dd": TERMS, "dt": TERMS, "li": frozenset({"li"}), "option": frozenset({"option"}), "p": frozenset({"div", "p"}),
    "td": CELLS, "th": CELLS, "tr": frozenset({"tr"}),
}  # fmt: skip
# Comments, declarations and tags. As in browsers, the end of the text ends each.
MARKUP = regex.compile(
    r"""<!--.*?(?:-->|\Z) | <[!?][^>]*>?
    | <(?P<closing>/?)(?P<tag>[a-zA-Z][^\s<>/"']*)(?P<attributes>(?:[^<>"']|"[^"]*(?:"|\Z)|'[^']*(?:'|\Z))*+)>?""",
    regex.VERBOSE | regex.DOTALL,
)
NOT_TRANSLATED = regex.compile(
    r"""\stranslate\s*=\s*["']?no\b | \sclass\s*=\s*(?:"[^"]*|'[^']*|)(?<![\w-])notranslate(?![\w-])""",
    regex.VERBOSE | regex.IGNORECASE,
)
DEPTH = 20  # of inline elements; tags further inside are placed one by one
MOST_NODES = 500  # of a block: more tags aren't in a sentence, and each takes time
# Scripts without spaces, and letters of the others with their marks.
SPACELESS = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
LETTER = rf"[[\w\p{{M}}]--{SPACELESS}]"
# Web and mail addresses, and placeholders: {name}, {{ name }}, ${name}, %(name)s, %s, %1$s.
PROTECTED = regex.compile(
    rf"""(?:https?://|www\.)[^\s<>"'\u3000-\u303f\uff00-\uff65]*[^\s<>"'.,;:!?)\]\u3000-\u303f\uff00-\uff65]
    | (?<!{LETTER}|[.+-])(?:{LETTER}|[.+-])++@(?:{LETTER}|-)+(?:\.(?:{LETTER}|-)+)+
    | \{{\{{[^{{}}]*\}}\}} | \$?\{{[^{{}}]*\}} | %\(\w+\)[a-z]
    | (?<![\w%])%(?:\d+\$)?(?:l?[dius]|@|\.\d+f)(?![A-Za-z0-9_%])""",
    regex.VERBOSE | regex.V1,
)
FIRST, NEXT = "\x01", "\x02"  # take the place of what stays once it is found in a translation
# Units, behind white space: a word, a letter of a script without spaces, a mark.
UNIT = regex.compile(rf"(\s*)({FIRST}{NEXT}*|{LETTER}+(?:['’-]{LETTER}+)*|{SPACELESS}\p{{M}}*|\S)", regex.V1)
IN_WORD = regex.compile(rf"{LETTER}{{2}}", regex.V1)
# Share of a word that has to come from an element so that it is in it, and of the only one.
MOST, LEAST = 0.5, 0.2
FORCED = 1e6  # outweighs all shares


class _Token(NamedTuple):
    """A part of HTML: `kind` is "text", "start", "end", "void" or "other"; `is_kept`: what is in it isn't prose."""

    begin: int
    kind: str
    tag: str = ""
    is_kept: bool = False


def _tokens(source: str) -> Iterator[_Token]:
    """Cuts HTML into tokens, each of which ends where the next one begins; nothing gets lost."""
    position = 0
    while match := MARKUP.search(source, position):
        if match.start() > position:
            yield _Token(position, "text")
        tag, position = (match["tag"] or "").lower(), match.end()
        if not tag or match["closing"]:
            yield _Token(match.start(), "end" if tag else "other", tag)
        elif tag in VOID or match[0].endswith("/>"):
            yield _Token(match.start(), "void", tag)
        else:
            is_kept = tag in CODE or bool(NOT_TRANSLATED.search(match["attributes"]))
            yield _Token(match.start(), "start", tag, is_kept)
            if tag in RAW:
                end = regex.compile(rf"</{tag}(?![\w-])|\Z", regex.IGNORECASE).search(source, position)
                position = end.start()
    if position < len(source):
        yield _Token(position, "text")
    yield _Token(len(source), "other")


@dataclass
class _Node:
    """Markup: an element, or what has no text. Its places are those in the block's text; `parent` is a number or -1."""

    raw: str  # its start tag, or all of it
    begin: int
    end: int
    parent: int
    depth: int  # number of elements around it
    closing: str = ""  # the end tag


class _Block:
    """The text of a block and its inline markup; `source` is the HTML, where it begins at `start`."""

    def __init__(self, source: str, start: int) -> None:
        self.source, self.start, self.stop = source, start, start
        self.text, self.nodes = "", list[_Node]()
        self.kept: dict[tuple[int, int], str] = {}  # places in the text of what stays -> an element's HTML, or ""
        self.open: list[tuple[str, int]] = []  # elements' names and numbers

    def add_kept(self, raw: str, text: str) -> None:
        """Adds an element that stays byte for byte."""
        if not text.strip():
            self.add_markup(raw)
            return
        self.kept[len(self.text), len(self.text) + len(text)] = raw
        self.text += text

    def add_markup(self, raw: str, tag: str = "") -> None:
        """Adds markup, or an element that stays open."""
        parent = self.open[-1][1] if self.open else -1
        self.nodes.append(_Node(raw, len(self.text), len(self.text), parent, len(self.open)))
        self.open += [(tag, len(self.nodes) - 1)] if tag else []

    def add_end(self, raw: str, tag: str) -> None:
        """Adds an end tag, as markup by itself if another element is open."""
        if self.open and self.open[-1][0] == tag:
            node = self.nodes[self.open.pop()[1]]
            node.end, node.closing = len(self.text), raw
        else:
            self.add_markup(raw)

    def finish(self, stop: int) -> None:
        """Ends the block; elements that are still open aren't closed."""
        self.stop = stop
        for _, number in self.open:
            self.nodes[number].end = len(self.text)
        stays = {place for begin, end in self.kept for place in range(begin, end)}
        for match in PROTECTED.finditer(self.text):
            if stays.isdisjoint(range(*match.span())):
                self.kept[match.span()] = ""
                stays.update(range(*match.span()))
        self.is_prose = any(char.isalpha() for place, char in enumerate(self.text) if place not in stays)
        self.solid = _solid(self.text)
        self._cuts = sorted({place for node in self.nodes for place in (node.begin, node.end)})

    def units(self, begin: int, end: int) -> list["_Unit"]:
        """Returns what stays, cut where elements begin or end."""
        if raw := self.kept[begin, end]:
            return [_Unit(raw, self.solid[begin], self.solid[end], True)]
        places = [begin, *self._cuts[bisect_right(self._cuts, begin) : bisect_left(self._cuts, end)], end]
        units, source = [], self.source[self.start : self.stop]
        for one, other in pairwise(places):
            text = self.text[one:other]
            raw = text if text in source else _escape(text)
            units.append(_Unit(raw, self.solid[one], self.solid[other], True))
        return units

    def gaps(self, begin: int, end: int) -> tuple[str, str]:
        """Returns a space, or nothing, as there is white space before and behind a part of the text."""
        return " " * self.text[max(begin - 1, 0) : begin].isspace(), " " * self.text[end : end + 1].isspace()

    def rendered(self, translation: Linked) -> str:
        """Returns the block in the target language."""
        raw = self.source[self.start : self.stop]
        begin, end = len(raw) - len(raw.lstrip()), len(raw.rstrip())
        return raw[:begin] + _Layout(self, translation).rendered() + raw[end:]


@dataclass
class _Unit:
    """A word of a translation and its place there, or a part of what stays and its place in the source."""

    raw: str
    begin: int  # white space isn't counted
    end: int
    is_kept: bool = False
    gap: str = ""  # white space before it


class _Layout:
    """Puts the markup of a block into its translation, a row of N units with N + 1 places around them."""

    def __init__(self, block: _Block, translation: Linked) -> None:
        self.block, self.linked = block, translation
        text, solid = translation.text, _solid(translation.text)
        found, missing = dict[int, list[_Unit]](), list[tuple[int, int]]()
        for begin, end in sorted(block.kept, key=lambda place: place[0] - place[1]):
            sought = _spaced(block.text[begin:end])
            if (start := _occurrence(sought, text)) < 0:
                missing.append((begin, end))
            else:
                found[start] = block.units(begin, end)
                text = text[:start] + FIRST + NEXT * (len(sought) - 1) + text[start + len(sought) :]
        self.units: list[_Unit] = []
        for match in UNIT.finditer(text):
            begin, end = match.span(2)
            units = found.get(begin) or [_Unit(_escape(match[2]), solid[begin], solid[end])]
            units[0].gap = match[1] if self.units else ""
            self.units += units
        self._note_places()
        for begin, end in sorted(missing):
            self._insert(begin, end)
        self.owners = np.full(len(self.units), -1)  # numbers of the innermost elements
        self.spans: list[tuple[int, int]] = []  # of all nodes so far

    def rendered(self) -> str:
        """Returns the translation with the markup."""
        parts = [part for at, one in enumerate(self.units) for part in ((at, 1, 0, 0, one.gap), (at, 3, 0, 0, one.raw))]
        for number, node in enumerate(self.block.nodes):  # each behind its parent
            parts += self._placed(number, node)
        return "".join(part[-1] for part in sorted(parts))

    def _placed(self, number: int, node: _Node) -> Iterator[tuple[int, int, int, int, str]]:
        """Places markup; yields what sorts its parts: place, before or behind the white space there, depth, number."""
        first, last = self.spans[node.parent] if node.parent >= 0 else (0, len(self.units))
        start, stop = self._span(node, first, last)
        self.owners[start:stop] = number
        self.spans.append((start, stop))
        before, behind = self.block.gaps(node.begin, node.end) if node.begin == node.end else ("", "")
        if start < stop:
            yield start, 2, node.depth, number, node.raw
            yield stop, 0, -node.depth, number, node.closing
        elif start < last and (start == first or before):
            yield start, 2, node.depth, number, node.raw + node.closing + behind
        else:
            yield start, 0, -node.depth, number, before * (start > 0) + node.raw + node.closing

    def _span(self, node: _Node, first: int, last: int) -> tuple[int, int]:
        """Returns the units that an element goes around, or the place of markup twice."""
        begin, end = self.block.solid[node.begin], self.block.solid[node.end]
        if begin < end:
            gains = self._shares(begin, end) - MOST
            gains[self._is_kept] *= FORCED
            gains[self.owners != node.parent] = -FORCED
            start, stop, gain = _best(gains)
            if gain > LEAST - MOST:  # if no word has MOST, the best one alone
                return start, stop
        places = np.arange(first, last + 1)
        around = np.concatenate([[-2], self.owners, [-2]])  # not inside of another element
        is_free = (around[places] != around[places + 1]) | (around[places] == node.parent)
        is_free[[0, -1]] = True
        return (self._boundary(begin, places[is_free]),) * 2

    def _insert(self, begin: int, end: int) -> None:
        """Puts what stays in place of the words that come from it, or else between those of its neighbours."""
        units, (before, behind) = self.block.units(begin, end), self.block.gaps(begin, end)
        shares = self._shares(units[0].begin, units[-1].end)
        start, stop, gain = _best(np.where(self._is_kept, -FORCED, shares - MOST))
        if gain > 0:
            units[0].gap = self.units[start].gap
        else:
            start = stop = self._boundary(units[0].begin, np.arange(len(self.units) + 1))
            units[0].gap = before * (start > 0)
            for one in self.units[start : start + 1]:
                one.gap = one.gap or behind
        self.units[start:stop] = units
        self._note_places()

    def _note_places(self) -> None:
        places = [(one.begin, one.end, one.is_kept) for one in self.units]
        self._begins, self._ends, is_kept = np.array(places, int).reshape(-1, 3).T
        self._is_kept = is_kept.astype(bool)

    def _shares(self, begin: int, end: int) -> Numbers:
        """Returns how much of each unit comes from a span of the source, (N,), from 0 to 1."""
        is_inside = (begin <= self._begins) & (self._ends <= end)
        return np.where(self._is_kept, is_inside, self.linked.shares(begin, end, self._begins, self._ends))

    def _boundary(self, begin: int, places: NDArray[np.int64]) -> int:
        """Returns the place that best divides what comes before a place of the source from what comes after it."""
        gains = np.concatenate([[0.0], np.cumsum(2 * self._shares(0, begin) - 1)])
        return int(places[np.argmax(gains[places])])


def _best(gains: Numbers) -> tuple[int, int, float]:
    """Returns the span with the largest sum, and the sum."""
    if not len(gains):
        return 0, 0, 0.0
    sums = np.concatenate([[0.0], np.cumsum(gains)])
    stop = int(np.argmax(sums[1:] - np.minimum.accumulate(sums[:-1]))) + 1
    start = stop - 1 - int(np.argmin(sums[:stop][::-1]))
    return start, stop, float(sums[stop] - sums[start])


def _occurrence(sought: str, text: str) -> int:
    """Returns where a text begins in another, not inside a word and best without a suffix; -1: nowhere."""
    starts = [at.start() for at in regex.finditer(regex.escape(sought), text)]
    starts = [start for start in starts if not (start and IN_WORD.match(text, start - 1))]
    alone = (start for start in starts if not IN_WORD.match(text, start + len(sought) - 1))
    return next(alone, starts[0] if starts else -1)


def _solid(text: str) -> list[int]:
    """Returns, for each place in a text, how many characters before it aren't white space."""
    return [0, *accumulate(not char.isspace() for char in text)]


def _spaced(text: str) -> str:
    """Returns text as a browser shows it: any white space is one space, and there is none around it."""
    return " ".join(text.split())


def _escape(text: str) -> str:
    return html.escape(text, quote=False)


class Document:
    """An HTML text: what has to be translated of it, and the text with the translations in place.

    Args:
        source: HTML, a page or a fragment.

    Attributes:
        texts: What is translated, each once: the text of each block, without markup and white space around it.
    """

    def __init__(self, source: str) -> None:
        self._source, self._blocks = source, list[_Block]()
        tokens, block, number = list(_tokens(source)), _Block(source, 0), 0
        while number < len(tokens) - 1:
            token = tokens[number]
            last = _end_of(number, tokens) if token.is_kept else number + 1
            raw = source[token.begin : tokens[last].begin]
            if token.kind == "text":
                block.text += html.unescape(raw)
            elif token.tag not in INLINE or len(block.nodes) >= MOST_NODES:
                self._finish(block, token.begin)
                block = _Block(source, tokens[last].begin)
            elif token.is_kept:
                block.add_kept(raw, _text_of(tokens[number : last + 1], source))
            elif token.kind == "end":
                block.add_end(raw, token.tag)
            else:
                is_element = token.kind == "start" and len(block.open) < DEPTH
                block.add_markup(raw, token.tag if is_element else "")
            number = last
        self._finish(block, len(source))
        self.texts = list(dict.fromkeys(_spaced(block.text) for block in self._blocks))

    def _finish(self, block: _Block, stop: int) -> None:
        block.finish(stop)
        self._blocks += [block] if block.is_prose else []

    def translated(self, translations: Mapping[str, Linked]) -> str:
        """Returns the HTML in the target language.

        Args:
            translations: Those of `texts`; a block without one stays as it is.
        """
        parts, position = list[str](), 0
        for block in self._blocks:
            if (translation := translations.get(_spaced(block.text))) is not None:
                parts += [self._source[position : block.start], block.rendered(translation)]
                position = block.stop
        return "".join([*parts, self._source[position:]])


def _text_of(tokens: Sequence[_Token], source: str) -> str:
    """Returns the text of an element, from its first token to the one behind it; a drawing and a script have none."""
    if tokens[0].tag in RAW or tokens[0].tag == "svg":
        return ""
    return "".join(
        html.unescape(source[one.begin : other.begin]) for one, other in pairwise(tokens) if one.kind == "text"
    )


def _end_of(number: int, tokens: Sequence[_Token]) -> int:
    """Returns the token behind an element, also where HTML lets its end tag out."""
    tag, depth, lists = tokens[number].tag, 1, 0
    closing = CLOSED_BY.get(tag, frozenset())
    for place, token in enumerate(tokens[number + 1 :], start=number + 1):
        step = {"start": 1, "end": -1}.get(token.kind, 0)
        if token.tag == tag and not lists and (step < 0 or tag not in closing):
            depth += step
            if not depth:
                return place + 1
        elif closing and token.tag in LISTS:
            lists += step
        if closing and (lists < 0 or (token.tag in closing and not lists)):
            return place
    return len(tokens) - 1


def translate_html(translator: Translator, source: str, split_sentences: str | None = None, **options: Any) -> str:
    """Translates the text of HTML.

    Args:
        translator: The model.
        source: A page or a fragment.
        split_sentences: As for `Translator`.
        **options: For the translator.

    Returns:
        The HTML with its markup.
    """
    document = Document(source)
    translations = translate_linked(translator, document.texts, split_sentences, **options)
    return document.translated(dict(zip(document.texts, translations, strict=True)))
