"""Translating HTML: markup, code and names stay as they are; only text between them is translated.

Block by block, a model translates the block's text, and each part in it that has markup of its own. Where the
translation of a part is found once in the translation of the block, the part's markup goes there. Otherwise the pieces
between the markup are translated one by one and keep the order of the source: markup is never lost, at the price of a
less fluent sentence.
"""

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

VOID = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
}  # fmt: skip
INLINE = {
    "a", "abbr", "b", "bdi", "bdo", "big", "cite", "code", "dfn", "em", "font", "i", "img", "ins", "del", "kbd",
    "label", "mark", "q", "s", "samp", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u", "var",
    "wbr", "",  # comments
}  # fmt: skip
FOREIGN = {"math", "svg"}  # XML, where "/>" ends an element
RAW = {"script", "style", "textarea"}  # elements without tags inside
CODE = RAW | {"code", "kbd", "math", "pre", "samp", "svg", "var"}  # what isn't prose
# Elements without an end tag end before the next of these, and with the list or table that they are in.
CELLS, TERMS, LISTS = frozenset({"td", "th", "tr"}), frozenset({"dt", "dd"}), {"dl", "ol", "select", "table", "ul"}
CLOSED_BY = {
    "dd": TERMS, "dt": TERMS, "li": frozenset({"li"}), "option": frozenset({"option"}), "p": frozenset({"div", "p"}),
    "td": CELLS, "th": CELLS, "tr": frozenset({"tr"}),
}  # fmt: skip
DEPTH = 20  # of inline elements; tags further inside stay where they are
MOST_PARTS = 100  # of a block whose markup is looked for in its translation
# Comments, declarations and tags. As in browsers, the end of the text ends each.
MARKUP = re.compile(
    r"""<!--.*?(?:-->|\Z) | <[!?][^>]*>?
    | <(?P<closing>/?)(?P<tag>[a-zA-Z][^\s<>/"']*)(?P<attributes>(?:[^<>"']|"[^"]*(?:"|\Z)|'[^']*(?:'|\Z))*+)>?""",
    re.VERBOSE | re.DOTALL,
)
NOT_TRANSLATED = re.compile(
    r"""\stranslate\s*=\s*["']?no\b | \sclass\s*=\s*(?:"[^"]*|'[^']*|)(?<![\w-])notranslate(?![\w-])""",
    re.VERBOSE | re.IGNORECASE,
)
# Web and mail addresses, and placeholders of templates: {name}, {{ name }}, ${name}, %(name)s.
PROTECTED = re.compile(
    r"""https?://[^\s<>"']*[^\s<>"'.,;:!?)\]] | www\.[^\s<>"']*[^\s<>"'.,;:!?)\]]
    | (?<![\w.+-])[\w.+-]++@[\w-]+(?:\.[\w-]+)+ | \{\{[^{}]*\}\} | \$?\{[^{}]*\} | %\(\w+\)[a-z]""",
    re.VERBOSE,
)


@dataclass(eq=False)
class _Part:
    """A part of a block: text, or what stays byte for byte, or an inline element.

    Attributes:
        text: Its text, as a model reads it.
        raw: What stays as it is: all of a protected part, or the start tag of an element; None: nothing.
        end: The end tag of an element.
        parts: Those of an element.
        tag: The element's name; "" for others.
    """

    text: str = ""
    raw: str | None = None
    end: str = ""
    parts: list["_Part"] = field(default_factory=list)
    tag: str = ""

    @property
    def whole(self) -> str:
        return "".join([self.text, *(part.whole for part in self.parts)])


class Document:
    """An HTML text: what has to be translated of it, and the text with the translations in place.

    Args:
        source: HTML, a page or a fragment.

    Attributes:
        texts: What is translated, each once: no markup, no white space around it.
    """

    def __init__(self, source: str) -> None:
        self._blocks: list[_Part] = []  # each with the markup behind it as its end
        self._open = [_Part()]  # the block and its inline elements that are open
        position = 0
        while match := MARKUP.search(source, position):
            self._add_text(source[position : match.start()])
            position = match.end()
            raw, tag, closing = match[0], (match["tag"] or "").lower(), match["closing"]
            is_kept = not (closing or tag in VOID or (tag in FOREIGN and raw.endswith("/>")))
            is_kept = is_kept and (tag in CODE or bool(NOT_TRANSLATED.search(match["attributes"] or "")))
            if is_kept:
                position = _end_of(tag, source, position)
                raw = source[match.start() : position]
            if tag not in INLINE:
                self._end_block(raw)
            elif closing and self._open[-1].tag == tag:
                self._open.pop().end = raw
            elif is_kept:
                self._open[-1].parts.append(_Part(html.unescape(re.sub("<[^<>]*>", "", raw)), raw))
            elif closing or tag in VOID or not tag or raw.endswith("/>") or len(self._open) > DEPTH:
                self._open[-1].parts.append(_Part(raw=raw))
            else:
                element = _Part(raw=raw, tag=tag)
                self._open[-1].parts.append(element)
                self._open.append(element)
        self._add_text(source[position:])
        self._end_block("")
        wanted = (_spaced(text) for block in self._blocks for text in _wanted(block))
        self.texts = list(dict.fromkeys(text for text in wanted if any(map(str.isalpha, text))))

    def translated(self, translations: Mapping[str, str]) -> str:
        """Returns the HTML in the target language.

        Args:
            translations: Those of `texts`.
        """
        return "".join(_render(block, translations) for block in self._blocks)

    def _add_text(self, raw: str) -> None:
        text, end = html.unescape(raw), 0
        for match in PROTECTED.finditer(text):
            own = [_Part(text[end : match.start()]), _Part(match[0], _escape(match[0]))]
            self._open[-1].parts += own if own[0].text else own[1:]
            end = match.end()
        if text[end:]:
            self._open[-1].parts.append(_Part(text[end:]))

    def _end_block(self, raw: str) -> None:
        """Ends a block; an inline element that is still open keeps its parts and isn't closed."""
        self._open[0].end = raw
        self._blocks.append(self._open[0])
        self._open = [_Part()]


def _end_of(tag: str, source: str, position: int) -> int:
    """Returns where an element ends that begins before `position`, also where HTML lets its end tag out."""
    if tag in RAW:
        end = re.compile(rf"</{tag}(?![\w-])[^<>]*>", re.IGNORECASE).search(source, position)
        return end.end() if end else len(source)
    closing = CLOSED_BY.get(tag, frozenset())
    depth, lists = 1, 0
    for match in MARKUP.finditer(source, position):
        name, step = (match["tag"] or "").lower(), -1 if match["closing"] else 1
        if name == tag and not lists and (step < 0 or tag not in closing):
            depth += 0 if tag in FOREIGN and match[0].endswith("/>") else step
            if not depth:
                return match.end()
        elif closing and name in LISTS:
            lists += step
        if closing and (lists < 0 or (name in closing and not lists)):
            return match.start()
    return len(source)


def _spaced(text: str) -> str:
    """Returns text as a browser shows it: any white space is one space, and there is none around it."""
    return " ".join(text.split())


def _escape(text: str) -> str:
    return html.escape(text, quote=False)


def _is_placed(part: _Part) -> bool:
    """Whether the markup in a part is looked for in its translation."""
    return 1 < len(part.parts) <= MOST_PARTS and all(one.raw is None or one.whole.strip() for one in part.parts)


def _wanted(part: _Part) -> Iterator[str]:
    """Yields the texts whose translations `_render` may look up."""
    if part.parts:
        if part.raw is not None or _is_placed(part):
            yield part.whole
        for one in part.parts:
            yield from _wanted(one)
    elif part.raw is None:
        yield part.text


def _translation(text: str, translations: Mapping[str, str]) -> str:
    known = translations.get(_spaced(text))
    return text if known is None else text.replace(text.strip(), known)


def _render(part: _Part, translations: Mapping[str, str]) -> str:
    """Returns a part in the target language; its parts are where their translations are, or in the source's order."""
    if not part.parts:
        return (_escape(_translation(part.text, translations)) if part.raw is None else part.raw) + part.end
    source, end = part.whole, 0
    whole, rendered = _translation(source, translations), part.raw or ""
    places = _places(part, whole, translations) if whole != source and _is_placed(part) else None
    if places is None:
        return rendered + "".join(_render(one, translations) for one in part.parts) + part.end
    for start, stop, one in places:
        rendered += _escape(whole[end:start]) + _render(one, translations)
        end = stop
    return rendered + _escape(whole[end:]) + part.end


def _places(block: _Part, whole: str, translations: Mapping[str, str]) -> list[tuple[int, int, _Part]] | None:
    """Returns where parts with markup are in the block's translation, or None if one of them isn't found just once."""
    places: list[tuple[int, int, _Part]] = []
    for part in block.parts:
        if part.raw is None:
            continue
        own = _spaced(_translation(part.whole, translations) if part.parts else part.text)
        found = list(re.finditer(rf"(?<!\w){re.escape(own)}(?!\w)", whole)) if own else []
        if len(found) != 1:
            return None
        places.append((*found[0].span(), part))
    places.sort(key=lambda place: place[:2])
    return places if all(one[1] <= other[0] for one, other in pairwise(places)) else None
