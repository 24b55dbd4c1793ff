"""Translating HTML: markup, code and names stay as they are; only text between them is translated.

Block by block, a model translates the block's text, and each part in it that has markup of its own. Where the
translation of a part is found once in the translation of the block, the part's markup goes there. Otherwise the pieces
between the markup are translated one by one and keep the order of the source: markup is never lost, at the price of a
less fluent sentence.
"""

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

INLINE = {
    "a", "abbr", "b", "bdi", "bdo", "big", "cite", "dfn", "em", "font", "i", "ins", "del", "label", "mark", "q", "s",
    "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u",
}  # fmt: skip
VOID = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
}  # fmt: skip
INLINE_VOID = {"img", "wbr"}
DEPTH = 20  # of inline elements; tags further inside stay where they are
MOST_PARTS = 100  # of a block whose markup is looked for in its translation
# Elements whose content isn't prose; in the first, there are no tags.
RAW = {"script", "style", "textarea"}
INLINE_CODE = {"code", "kbd", "samp", "var"}
CODE = INLINE_CODE | RAW | {"pre", "svg", "math"}
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
class _Node:
    """A part of a block: text, or an element with parts of its own, or what stays byte for byte.

    Attributes:
        text: Its text, as a model reads it.
        raw: What stays as it is: all of a protected part, or the start tag of an element.
        end: The end tag of an element.
        parts: Parts of an element; None: it has none.
    """

    text: str = ""
    raw: str | None = None
    end: str = ""
    parts: list["_Node"] | None = None


def _text_of(parts: Sequence[_Node]) -> str:
    return "".join(part.text if part.parts is None else _text_of(part.parts) for part in parts)


class _Parser:
    """Cuts HTML into blocks of parts, and the markup between blocks."""

    def __init__(self, source: str) -> None:
        self.blocks: list[str | list[_Node]] = []
        self._top: list[_Node] = []
        self._open: list[tuple[str, _Node, list[_Node]]] = []  # inline elements with their parts
        position = 0
        while match := MARKUP.search(source, position):
            self._text(source[position : match.start()])
            tag, position = (match["tag"] or "").lower(), match.end()
            if match["closing"]:
                self._end(tag, match[0])
            elif tag and tag not in VOID and (tag in CODE or NOT_TRANSLATED.search(match["attributes"])):
                position = _end_of(tag, source, position)
                self._keep(tag, source[match.start() : position])
            else:
                self._start(tag, match[0])
        self._text(source[position:])
        self._boundary("")

    @property
    def _parts(self) -> list[_Node]:
        return self._open[-1][2] if self._open else self._top

    def _text(self, raw: str) -> None:
        self._parts.append(_Node(html.unescape(raw)))

    def _keep(self, tag: str, raw: str) -> None:
        if tag in INLINE or tag in INLINE_CODE:
            self._parts.append(_Node(html.unescape(re.sub("<[^<>]*>", "", raw)), raw=raw))
        else:
            self._boundary(raw)

    def _start(self, tag: str, raw: str) -> None:
        if tag in INLINE and not raw.endswith("/>") and len(self._open) < DEPTH:
            parts: list[_Node] = []
            node = _Node(raw=raw, parts=parts)
            self._parts.append(node)
            self._open.append((tag, node, parts))
        elif tag in INLINE or tag in INLINE_VOID or not tag:
            self._parts.append(_Node(raw=raw))
        else:
            self._boundary(raw)

    def _end(self, tag: str, raw: str) -> None:
        if self._open and self._open[-1][0] == tag:
            self._open.pop()[1].end = raw
        elif tag in INLINE:
            self._parts.append(_Node(raw=raw))  # it closes nothing
        else:
            self._boundary(raw)

    def _boundary(self, raw: str) -> None:
        """Ends a block; an inline element that is still open keeps its parts and isn't closed."""
        self.blocks += [self._top, raw]
        self._top, self._open = [], []


def _end_of(tag: str, source: str, position: int) -> int:
    """Returns where an element ends that begins before `position`."""
    depth = 1
    for match in re.compile(rf"<(/?){re.escape(tag)}(?![\w-])[^<>]*>", re.IGNORECASE).finditer(source, position):
        depth = 0 if tag in RAW and match[1] else depth - 1 if match[1] else depth + 1
        if not depth:
            return match.end()
    return len(source)


def _with_protected(parts: Sequence[_Node]) -> list[_Node]:
    """Cuts addresses and placeholders out of the texts."""
    cut: list[_Node] = []
    for part in parts:
        if part.parts is not None:
            cut.append(_Node(raw=part.raw, end=part.end, parts=_with_protected(part.parts)))
        elif part.raw is not None:
            cut.append(part)
        else:
            end = 0
            for match in PROTECTED.finditer(part.text):
                cut += [_Node(part.text[end : match.start()]), _Node(match[0], raw=_escape(match[0]))]
                end = match.end()
            cut.append(_Node(part.text[end:]))
    return [part for part in cut if part.text or part.raw is not None]


def _escape(text: str) -> str:
    return html.escape(text, quote=False)


def _wanted(parts: Sequence[_Node]) -> Iterator[str]:
    """Yields the texts whose translations `_render` may look up."""
    if len(parts) > 1:
        yield _text_of(parts)
    for part in parts:
        if part.parts is not None:
            yield from _wanted(part.parts)
            yield _text_of(part.parts)
        elif part.raw is None:
            yield part.text


class Document:
    """An HTML text: what has to be translated of it, and the text with the translations in place.

    Args:
        source: HTML, a page or a fragment.

    Attributes:
        texts: What is translated, each once: no markup, no white space around it.
    """

    def __init__(self, source: str) -> None:
        blocks = _Parser(source).blocks
        self._blocks = [block if isinstance(block, str) else _with_protected(block) for block in blocks]
        wanted = (text.strip() for block in self._blocks if isinstance(block, list) for text in _wanted(block))
        self.texts = list(dict.fromkeys(text for text in wanted if any(map(str.isalpha, text))))

    def translated(self, translations: Mapping[str, str]) -> str:
        """Returns the HTML in the target language.

        Args:
            translations: Those of `texts`.
        """
        return "".join(block if isinstance(block, str) else _render(block, translations) for block in self._blocks)


def _translation(text: str, translations: Mapping[str, str]) -> str:
    stripped = text.strip()
    if stripped not in translations:
        return text
    start = len(text) - len(text.lstrip())
    return text[:start] + translations[stripped] + text[start + len(stripped) :]


def _render(parts: Sequence[_Node], translations: Mapping[str, str]) -> str:
    """Returns a block or an element's content; its parts are where their translations are, or in the source's order."""
    whole = _translation(_text_of(parts), translations)
    places = _places(parts, whole, translations) if 1 < len(parts) <= MOST_PARTS else None
    if places is None:
        return "".join(_rendered(part, translations) for part in parts)
    rendered, end = "", 0
    for start, stop, part in places:
        rendered += _escape(whole[end:start]) + _rendered(part, translations)
        end = stop
    return rendered + _escape(whole[end:])


def _rendered(part: _Node, translations: Mapping[str, str]) -> str:
    if part.parts is not None:
        return f"{part.raw}{_render(part.parts, translations)}{part.end}"
    return _escape(_translation(part.text, translations)) if part.raw is None else part.raw


def _places(parts: Sequence[_Node], whole: str, translations: Mapping[str, str]) -> list[tuple[int, int, _Node]] | None:
    """Returns where the parts with markup are in a translation, or None where one of them isn't found just once."""
    places: list[tuple[int, int, _Node]] = []
    for part in parts:
        if part.parts is None and part.raw is None:
            continue
        own = part.text if part.parts is None else _translation(_text_of(part.parts), translations)
        found = list(re.finditer(rf"(?<!\w){re.escape(own.strip())}(?!\w)", whole)) if own.strip() else []
        if len(found) != 1:
            return None
        places.append((*found[0].span(), part))
    places.sort(key=lambda place: place[:2])
    is_apart = all(one[1] <= other[0] for one, other in pairwise(places))
    return places if is_apart else None
