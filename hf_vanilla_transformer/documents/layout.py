"""The text of a block of HTML with its markup, and where the markup goes in a translation.

An inline element goes around the words that attend to its own, in one place. What stays is where the translation has
it, else in place of the words that attend to it, else where its neighbours are. Markup is never lost.
"""

import html
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import regex

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
class Node:
    """An element, or other markup without text of its own."""

    opening: Span  # the start tag, or all of the markup, in the source
    begin: int  # in the block's text
    end: int
    closing: Span = (0, 0)  # the end tag
    inner: list["Node"] = field(default_factory=list)


class Block:
    """A text and its inline markup, from `start` of the source; with an odd level, the element `name`, which stays."""

    def __init__(self, start: int, level: int = 0, name: str = "") -> None:
        self.start, self.first, self.level, self.name, self.has_blocks = start, start, level, name, False
        self.text, self.kept = "", dict[Span, Span]()  # places in the text of what stays -> an element's in the source
        self.nodes = [Node((0, 0), 0, 0)]  # the first one is all of the block
        self.open = [("", self.nodes[0])]  # elements and their names

    def add(self, raw: Span, kind: str, data: str) -> None:
        """Adds "text", the "start" or "end" of an element, other markup, or what is "kept" byte for byte."""
        node = Node(raw, len(self.text), len(self.text))
        if kind == "text":
            self.first = self.first if self.text.strip() else raw[0]  # where the first word is
            self.text += data.translate({0: None, 0xAD: None, 0xFEFF: None})  # soft hyphens and marks aren't shown
        elif kind == "kept" and data.strip():
            self.text += data
            self.kept[node.begin, len(self.text)] = raw
        elif kind == "end" and self.open[-1][0] == data:
            node = self.open.pop()[1]
            node.end, node.closing = len(self.text), raw
        else:
            self.nodes.append(node)
            self.open[-1][1].inner.append(node)
            self.open += [(data, node)] if kind == "start" and len(self.open) <= DEPTH else []

    def finish(self, stop: int) -> bool:
        """Ends the block, and tells whether it has words; elements that are still open aren't closed."""
        self.stop, self.key, self.solid = stop, spaced(self.text), _solid(self.text)
        for _, node in self.open:
            node.end = len(self.text)
        stays = {place for begin, end in self.kept for place in range(begin, end)}
        for match in PROTECTED.finditer(self.text):
            if stays.isdisjoint(range(*match.span())):
                self.kept[match.span()] = (0, 0)
                stays.update(range(*match.span()))
        return any(char.isalpha() for place, char in enumerate(self.text) if place not in stays)


@dataclass
class _Unit:
    """A word of a translation and its place there; or what is written as it is, and its place in the source."""

    raw: str
    begin: int  # white space isn't counted
    end: int
    is_kept: bool = False
    gap: str = ""  # white space before it


class Layout:
    """Puts the markup of a block into its translation.

    `copy` returns what is written for a part of the source, `raw` is the block's.
    """

    def __init__(self, block: Block, translation: Linked, raw: str, copy: Callable[[int, int], str]) -> None:
        self.block, self.linked, self.raw, self.copy = block, translation, raw, copy

    def rendered(self) -> str:
        """Returns the translation with the markup."""
        text, solid = self.linked.text, _solid(self.linked.text)
        found, missing, units = dict[int, list[_Unit]](), list[Span](), list[_Unit]()
        for begin, end in sorted(self.block.kept, key=lambda place: place[0] - place[1]):
            sought = spaced(self.block.text[begin:end])
            if (start := _occurrence(sought, text)) < 0:
                missing.append((begin, end))
            else:
                found[start] = self._kept(begin, end)
                text = text[:start] + FIRST + NEXT * (len(sought) - 1) + text[start + len(sought) :]
        for match in UNIT.finditer(text):
            begin, end = match.span(2)
            new = found.get(begin) or [_Unit(html.escape(match[2], quote=False), solid[begin], solid[end])]
            new[0].gap = match[1] if units else ""
            units += new
        for begin, end in sorted(missing):
            new = self._kept(begin, end)
            start, stop, gain = _best(self._gains(units, new[0].begin, new[-1].end))
            if gain > 0:
                new[0].gap, units[start:stop] = units[start].gap, new
            else:
                self._insert(units, new, begin, end)
        text = self._filled(self.block.nodes[0], units)
        return self.raw[: len(self.raw) - len(self.raw.lstrip())] + text + self.raw[len(self.raw.rstrip()) :]

    def _kept(self, begin: int, end: int) -> list[_Unit]:
        """Returns what stays, cut where elements begin or end."""
        raw, solid = self.copy(*self.block.kept[begin, end]), self.block.solid
        cuts = {place for node in self.block.nodes for place in (node.begin, node.end) if begin < place < end}
        units = []
        for one, other in pairwise([begin, *(() if raw else sorted(cuts)), end]):
            text = self.block.text[one:other]
            written = raw or (text if text in self.raw else html.escape(text, quote=False))
            units.append(_Unit(written, solid[one], solid[other], True))
        return units

    def _filled(self, node: Node, units: list[_Unit]) -> str:
        """Returns the units of an element with the markup inside: around units, then between them."""
        for one in [one for one in node.inner if not self._is_around(one, units)]:
            begin, end = self.block.solid[one.begin], self.block.solid[one.end]
            self._insert(units, [_Unit(self._tags(one), begin, end, True)], one.begin, one.begin)
        return "".join(one.gap + one.raw for one in units)

    def _is_around(self, node: Node, units: list[_Unit]) -> bool:
        """Makes one unit of those that an element goes around; False: there are none."""
        begin, end = self.block.solid[node.begin], self.block.solid[node.end]
        start, stop, gain = _best(self._gains(units, begin, end))
        if begin == end or gain <= LEAST - MOST:  # if no word has MOST, the best one alone
            return False
        gap, units[start].gap = units[start].gap, ""
        written = self.copy(*node.opening) + self._filled(node, units[start:stop]) + self.copy(*node.closing)
        units[start:stop] = [_Unit(written, begin, end, True, gap)]
        return True

    def _tags(self, node: Node) -> str:
        return "".join([self.copy(*node.opening), *map(self._tags, node.inner), self.copy(*node.closing)])

    def _insert(self, units: list[_Unit], new: list[_Unit], begin: int, end: int) -> None:
        """Puts units between those that come from what is before and behind them in the source."""
        gains, text = self._gains(units, 0, new[0].begin).clip(-MOST, MOST), self.block.text
        place = int(np.argmax(np.cumsum([0.0, *gains])))
        before, behind = text[max(begin - 1, 0) : begin].isspace() * " ", text[end : end + 1].isspace() * " "
        for follows in units[place : place + 1]:
            if begin == end and (before or not place):  # markup has the white space that there was
                before, follows.gap = follows.gap, behind
            else:
                follows.gap = follows.gap or behind
        new[0].gap = before if place else ""
        units[place:place] = new

    def _gains(self, units: list[_Unit], begin: int, end: int) -> Numbers:
        """Returns how much each unit is in favour of coming from a span of the source, (N,); below 0: against it."""
        begins, ends, is_kept = np.array([(one.begin, one.end, one.is_kept) for one in units], int).reshape(-1, 3).T
        forced = np.where((begin <= begins) & (ends <= end), FORCED, -FORCED)
        return np.where(is_kept, forced, self.linked.shares(begin, end, begins, ends) - MOST)


def _best(gains: Numbers) -> tuple[int, int, float]:
    """Returns the span with the largest sum, and the sum."""
    if not len(gains):
        return 0, 0, -FORCED
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
