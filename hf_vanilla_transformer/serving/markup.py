"""Translating HTML: markup, code and names stay as they are; only text between them is translated.

Block by block, a model translates the block's text, and each part in it that has markup of its own. Where the
translation of a part is found once in the translation of the block, the part's markup goes there. Otherwise the pieces
between the markup are translated one by one and keep the order of the source: markup is never lost, at the price of a
less fluent sentence.
"""

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser

INLINE = {
    "a", "abbr", "b", "bdi", "bdo", "big", "cite", "dfn", "em", "font", "i", "ins", "del", "label", "mark", "q", "s",
    "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u",
}  # fmt: skip
VOID = {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr",
}  # fmt: skip
# Elements whose content isn't prose.
INLINE_CODE = {"code", "kbd", "samp", "var"}
CODE = INLINE_CODE | {"pre", "script", "style", "textarea", "svg", "math"}
NOT_TRANSLATED_CLASS = "notranslate"
# Web and mail addresses, and placeholders of templates: {name}, {{ name }}, ${name}, %(name)s.
PROTECTED = re.compile(
    r"""https?://[^\s<>"']*[^\s<>"'.,;:!?)\]] | www\.[^\s<>"']*[^\s<>"'.,;:!?)\]] | [\w.+-]+@[\w-]+(?:\.[\w-]+)+
    | \{\{[^{}]*\}\} | \$?\{[^{}]*\} | %\(\w+\)[a-z]""",
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


@dataclass
class _Block:
    """Text between the boundaries of blocks, or what stays as it is."""

    raw: str = ""
    parts: list[_Node] = field(default_factory=list)


def _text_of(parts: Sequence[_Node]) -> str:
    return "".join(part.text if part.parts is None else _text_of(part.parts) for part in parts)


class _Parser(HTMLParser):
    """Cuts HTML into blocks; the slices of its source, joined, are the source."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.blocks: list[_Block] = []
        self._open: list[tuple[str, _Node]] = []  # inline elements
        self._top: list[_Node] = []
        self._kept: list[str] = []  # open tags of what isn't translated
        self._kept_raw = ""

    def feed(self, data: str) -> None:
        """Reads all of the source."""
        self._source = data
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", data))]
        self._slices: list[tuple[int, Callable[[str], None]]] = []
        super().feed(data)
        self.close()
        starts = [start for start, _ in self._slices] + [len(data)]
        for (start, handle), end in zip(self._slices, starts[1:], strict=True):
            handle(data[start:end])
        self._boundary(self._kept_raw)

    def _later(self, handle: Callable[[str], None]) -> None:
        line, column = self.getpos()
        self._slices.append((self._line_starts[line - 1] + column, handle))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._later(lambda raw: self._start(tag, dict(attrs), raw, closed=False))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._later(lambda raw: self._start(tag, dict(attrs), raw, closed=True))

    def handle_endtag(self, tag: str) -> None:
        self._later(lambda raw: self._end(tag, raw))

    def handle_data(self, data: str) -> None:
        self._later(self._text)

    def handle_entityref(self, name: str) -> None:
        self._later(self._text)

    handle_charref = handle_entityref

    def handle_comment(self, data: str) -> None:
        self._later(self._keep)

    handle_pi = unknown_decl = handle_comment

    def handle_decl(self, decl: str) -> None:
        self._later(self._boundary)

    @property
    def _parts(self) -> list[_Node]:
        parts = self._open[-1][1].parts if self._open else self._top
        assert parts is not None
        return parts

    def _start(self, tag: str, attributes: dict[str, str | None], raw: str, *, closed: bool) -> None:
        closed = closed or tag in VOID
        if self._kept:
            self._kept_raw += raw
            if not closed:
                self._kept.append(tag)
        elif not closed and (tag in CODE or _is_protected(attributes)):
            self._kept, self._kept_raw = [tag], raw
        elif tag in INLINE and not closed:
            node = _Node(raw=raw, parts=[])
            self._parts.append(node)
            self._open.append((tag, node))
        elif tag in ("img", "wbr") or (closed and tag in INLINE):
            self._keep(raw)
        else:
            self._boundary(raw)

    def _end(self, tag: str, raw: str) -> None:
        if self._kept:
            self._kept_raw += raw
            if tag in self._kept:
                del self._kept[len(self._kept) - 1 - self._kept[::-1].index(tag) :]
            if not self._kept:
                self._end_of_kept(tag)
        elif self._open and self._open[-1][0] == tag:
            self._open.pop()[1].end = raw
        elif tag in INLINE:
            self._keep(raw)  # it closes nothing
        else:
            self._boundary(raw)

    def _end_of_kept(self, tag: str) -> None:
        raw, self._kept_raw = self._kept_raw, ""
        if tag in INLINE or tag in INLINE_CODE:
            self._parts.append(_Node(html.unescape(re.sub("<[^>]*>", "", raw)), raw=raw))
        else:
            self._boundary(raw)

    def _text(self, raw: str) -> None:
        if self._kept:
            self._kept_raw += raw
            return
        parts = self._parts
        if parts and parts[-1].raw is None:
            parts[-1].text += html.unescape(raw)
        else:
            parts.append(_Node(html.unescape(raw)))

    def _keep(self, raw: str) -> None:
        if self._kept:
            self._kept_raw += raw
        else:
            self._parts.append(_Node(raw=raw))

    def _boundary(self, raw: str) -> None:
        """Ends a block; an inline element that is still open keeps its parts and isn't closed."""
        if self._top:
            self.blocks.append(_Block(parts=self._top))
        self.blocks.append(_Block(raw=raw))
        self._top, self._open, self._kept_raw = [], [], ""


def _is_protected(attributes: Mapping[str, str | None]) -> bool:
    translate = (attributes.get("translate") or "").lower()
    return translate == "no" or NOT_TRANSLATED_CLASS in (attributes.get("class") or "").split()


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
        parser = _Parser()
        parser.feed(source)
        self._blocks = [_Block(block.raw, _with_protected(block.parts)) for block in parser.blocks]
        wanted = (text.strip() for block in self._blocks for text in _wanted(block.parts))
        self.texts = list(dict.fromkeys(text for text in wanted if any(map(str.isalpha, text))))

    def translated(self, translations: Mapping[str, str]) -> str:
        """Returns the HTML in the target language.

        Args:
            translations: Those of `texts`.
        """
        return "".join(block.raw + _render(block.parts, translations) for block in self._blocks)


def _translation(text: str, translations: Mapping[str, str]) -> str:
    stripped = text.strip()
    if stripped not in translations:
        return text
    start = len(text) - len(text.lstrip())
    return text[:start] + translations[stripped] + text[start + len(stripped) :]


def _render(parts: Sequence[_Node], translations: Mapping[str, str]) -> str:
    fluent = _in_translation(parts, translations) if len(parts) > 1 else None
    return fluent if fluent is not None else "".join(_rendered(part, translations) for part in parts)


def _rendered(part: _Node, translations: Mapping[str, str]) -> str:
    if part.parts is not None:
        return f"{part.raw}{_render(part.parts, translations)}{part.end}"
    return _escape(_translation(part.text, translations)) if part.raw is None else part.raw


def _in_translation(parts: Sequence[_Node], translations: Mapping[str, str]) -> str | None:
    """Returns the translation of a block with the markup of its parts, or None where a part isn't found just once."""
    whole = _translation(_text_of(parts), translations)
    places: list[tuple[int, int, str]] = []
    for part in parts:
        if part.parts is None and part.raw is None:
            continue
        own = part.text if part.parts is None else _translation(_text_of(part.parts), translations)
        found = list(re.finditer(rf"(?<!\w){re.escape(own.strip())}(?!\w)", whole)) if own.strip() else []
        if len(found) != 1:
            return None
        places.append((*found[0].span(), _rendered(part, translations)))
    rendered, end = "", 0
    for start, stop, markup in sorted(places):
        if start < end:
            return None
        rendered += _escape(whole[end:start]) + markup
        end = stop
    return rendered + _escape(whole[end:])
