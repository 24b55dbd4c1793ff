"""The text of a block of HTML with its markup, and where the markup goes in a translation.

An inline element goes around the words that attend to its own, in one place. What stays is where the translation has
it, else in place of the words that attend to it, else where its neighbours are. Markup is never lost.
"""

import html
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import regex
from numpy.typing import NDArray

from .links import Linked, Numbers

DEPTH = 20  # of inline elements; tags further inside are placed one by one
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

Span = tuple[int, int]


@dataclass
class _Node:
    """Markup: an element, or what has no text. Its places are those in the block's text; `parent` is a number or -1."""

    raw: Span  # its start tag, or all of it, in the source
    begin: int
    end: int
    parent: int
    last: int  # the number of the last node inside, or its own
    closing: Span = (0, 0)  # the end tag


class Block:
    """A text and its inline markup, from `start` of the source; with an odd level, the element `name`, which stays."""

    def __init__(self, start: int, level: int = 0, name: str = "") -> None:
        self.start, self.first, self.level, self.name, self.has_blocks = start, start, level, name, False
        self.text, self.nodes = "", list[_Node]()
        self.kept: dict[Span, Span] = {}  # places in the text of what stays -> an element's in the source
        self.open: list[tuple[str, int]] = []  # elements' names and numbers

    def add_text(self, text: str, begin: int) -> None:
        """Adds text that is at `begin` in the source."""
        self.first = self.first if self.text.strip() else begin  # where the first word is
        self.text += text.translate({0: None, 0xAD: None})  # soft hyphens aren't shown

    def add_kept(self, raw: Span, text: str) -> None:
        """Adds what stays byte for byte."""
        if not text.strip():
            self.add_markup(raw)
            return
        self.kept[len(self.text), len(self.text) + len(text)] = raw
        self.text += text

    def add_markup(self, raw: Span, tag: str = "") -> None:
        """Adds markup, or the start tag of an element that is open from now on."""
        parent, number = self.open[-1][1] if self.open else -1, len(self.nodes)
        self.nodes.append(_Node(raw, len(self.text), len(self.text), parent, number))
        self.open += [(tag, number)] if tag and len(self.open) < DEPTH else []

    def add_end(self, raw: Span, tag: str) -> None:
        """Adds an end tag, as markup by itself if another element is open."""
        if not self.open or self.open[-1][0] != tag:
            self.add_markup(raw)
            return
        node = self.nodes[self.open.pop()[1]]
        node.end, node.closing, node.last = len(self.text), raw, len(self.nodes) - 1

    def finish(self, stop: int) -> bool:
        """Ends the block, and tells whether it has words; elements that are still open aren't closed."""
        self.stop, self.key, self.solid = stop, spaced(self.text), _solid(self.text)
        for _, number in self.open:
            self.nodes[number].end = len(self.text)
        stays = {place for begin, end in self.kept for place in range(begin, end)}
        for match in PROTECTED.finditer(self.text):
            if stays.isdisjoint(range(*match.span())):
                self.kept[match.span()] = (0, 0)
                stays.update(range(*match.span()))
        return any(char.isalpha() for place, char in enumerate(self.text) if place not in stays)

    def gaps(self, begin: int, end: int) -> tuple[str, str]:
        """Returns a space, or nothing, as there is white space before and behind a part of the text."""
        return " " * self.text[max(begin - 1, 0) : begin].isspace(), " " * self.text[end : end + 1].isspace()


@dataclass
class _Unit:
    """A word of a translation and its place there, or a part of what stays and its place in the source."""

    raw: str
    begin: int  # white space isn't counted
    end: int
    is_kept: bool = False
    gap: str = ""  # white space before it


class Layout:
    """Puts the markup of a block into its translation, a row of N units with N + 1 places around them.

    `copy` returns what is written for a part of the source, `raw` is the block's.
    """

    def __init__(self, block: Block, translation: Linked, raw: str, copy: Callable[[int, int], str]) -> None:
        self.block, self.linked, self.raw, self.copy = block, translation, raw, copy
        text, solid = translation.text, _solid(translation.text)
        found, missing = dict[int, list[_Unit]](), list[Span]()
        for begin, end in sorted(block.kept, key=lambda place: place[0] - place[1]):
            sought = spaced(block.text[begin:end])
            if (start := _occurrence(sought, text)) < 0:
                missing.append((begin, end))
            else:
                found[start] = self._kept(begin, end)
                text = text[:start] + FIRST + NEXT * (len(sought) - 1) + text[start + len(sought) :]
        self.units: list[_Unit] = []
        for match in UNIT.finditer(text):
            begin, end = match.span(2)
            units = found.get(begin) or [_Unit(html.escape(match[2], quote=False), solid[begin], solid[end])]
            units[0].gap = match[1] if self.units else ""
            self.units += units
        self._note_places()
        for begin, end in sorted(missing):
            self._insert(begin, end)
        self.owners = np.full(len(self.units), -1)  # numbers of the innermost elements
        self.spans: list[tuple[int, int, int, int]] = []  # of all nodes so far, with the depth and the side inside

    def rendered(self) -> str:
        """Returns the translation with the markup."""
        parts = [
            part for at, one in enumerate(self.units) for part in ((at, 1, 0, 0, 0, one.gap), (at, 3, 0, 0, 0, one.raw))
        ]
        for number, node in enumerate(self.block.nodes):  # each behind its parent
            parts += self._placed(number, node)
        text = "".join(part[-1] for part in sorted(parts))
        return self.raw[: len(self.raw) - len(self.raw.lstrip())] + text + self.raw[len(self.raw.rstrip()) :]

    def _placed(self, number: int, node: _Node) -> Iterator[tuple[int, int, int, int, int, str]]:
        """Places markup; yields what sorts its parts: place, before or behind the white space there, depth, number."""
        first, last, depth, side = self.spans[node.parent] if node.parent >= 0 else (0, len(self.units), 0, 1)
        start, stop = self._span(node, first, last)
        self.owners[start:stop] = number
        opening, closing, before, behind = self.copy(*node.raw), self.copy(*node.closing), "", ""
        if start < stop:
            self.spans.append((start, stop, depth + 1, 1))
            yield start, 2, depth, number, 0, opening
            yield stop, 0, -depth, number, 0, closing
            return
        if side == 1:
            before, behind = self.block.gaps(node.begin, node.end) if node.begin == node.end else ("", "")
            side = 2 if start < last and (start == first or before) else 0
            before, behind = ("", behind) if side else (before * (start > 0), "")
        self.spans.append((start, start, depth, side))
        yield start, side, depth * (side - 1), number, -len(self.block.nodes), before + opening
        yield start, side, depth * (side - 1), node.last, -number, closing + behind

    def _kept(self, begin: int, end: int) -> list[_Unit]:
        """Returns what stays, cut where elements begin or end."""
        raw, solid = self.copy(*self.block.kept[begin, end]), self.block.solid
        cuts = {
            place for node in self.block.nodes for place in (node.begin, node.end) if begin < place < end and not raw
        }
        units = []
        for one, other in pairwise(sorted(cuts | {begin, end})):
            text = self.block.text[one:other]
            written = raw or (text if text in self.raw else html.escape(text, quote=False))
            units.append(_Unit(written, solid[one], solid[other], True))
        return units

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
        units, (before, behind) = self._kept(begin, end), self.block.gaps(begin, end)
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


def spaced(text: str) -> str:
    """Returns text as a browser shows it: any white space is one space, and there is none around it."""
    return " ".join(text.split())
