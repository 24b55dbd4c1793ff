"""HTML: each paragraph's text is translated as one, and its markup goes where the model's attention leads (`layout`).

Code, what must not be translated, addresses and placeholders come back byte for byte.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import regex

from ..data.formats import CorpusError
from ..errors import install
from .layout import DEPTH, Block, Layout, Span
from .links import Document, Linked

try:
    from tinyhtml5.constants import Token
    from tinyhtml5.parser import HTMLParser
    from tinyhtml5.tokenizer import HTMLTokenizer
except ImportError as error:
    raise ImportError(f"HTML needs {error.name}, which isn't installed: {install('documents')}") from error

# What the standard's style sheet shows as blocks, list items and parts of tables; titles, and line breaks.
BLOCK = regex.compile(
    r"address|article|aside|blockquote|body|br|caption|center|col|colgroup|d[dlt]|details|dialog|dir|div|fieldset"
    r"|figcaption|figure|footer|form|frame|frameset|h[1-6r]|head|header|hgroup|html|legend|li|listing|main|menu|nav"
    r"|[ou]l|optgroup|option|p|plaintext|pre|search|section|summary|table|tbody|t[dhr]|tfoot|thead|title|xmp"
)
# What stays as part of its sentence, what stays without being part of it, and what has sentences of its own.
CODE = {"code", "kbd", "listing", "math", "pre", "samp", "var"}
SILENT = {"iframe", "noembed", "noframes", "plaintext", "rp", "rt", "rtc", "script", "style", "svg", "textarea", "xmp"}
APART = {"audio", "button", "canvas", "datalist", "label", "meter", "object", "progress", "select", "template", "video"}
# The standard's attributes to translate, but for styles, documents and file names, and ARIA's: in which elements.
ATTRIBUTES = {
    "abbr": {"th"}, "alt": {"area", "img", "input"}, "aria-label": {""}, "aria-placeholder": {""},
    "aria-roledescription": {""}, "aria-valuetext": {""}, "content": {"meta description", "meta keywords"},
    "label": {"optgroup", "option", "track"}, "lang": {"html"}, "placeholder": {"input", "textarea"}, "title": {""},
    "value": {"input button", "input reset"}, "xml:lang": {"html"},
}  # fmt: skip
ATTRIBUTE = regex.compile(
    r"""[/\t\n\f\r ]*+([^/>\t\n\f\r ][^/>=\t\n\f\r ]*+)(?:[\t\n\f\r ]*+=[\t\n\f\r ]*+(["']?)(?P<value>"""
    r"""(?<=")[^"]*+|(?<=')[^']*+|(?<!["'])[^>\t\n\f\r ]*+)\2)?+"""
)
KINDS = {Token.START_TAG: "start", Token.END_TAG: "end", Token.CHARACTERS: "text", Token.SPACE_CHARACTERS: "text"}
LANGUAGE = "\0"  # the page's, among the texts
FRAGMENTS = {"tbody": "table", "td": "tr", "tfoot": "table", "th": "tr", "thead": "table", "tr": "tbody"}
DEEPEST = 512  # as in Chromium
MOST_NODES = 500  # of a block: more tags aren't in a sentence, and each takes time
State = tuple[int, bool]  # an element's level, odd if it stays, and whether its attributes are translated


def _inside(outer: State, name: str, attributes: Mapping[str, str]) -> State:
    """Returns the state of an element in another; what isn't in the same sentence is at least 2 levels away."""
    says = {"no": False, "": True, "yes": True}.get(attributes.get("translate", "?").lower())
    says = False if "notranslate" in attributes.get("class", "").lower().split() else says
    stays = name in SILENT or (bool(outer[0] % 2 or name in CODE) if says is None else not says)
    step = (stays != outer[0] % 2) + 2 * (name in SILENT or (name in APART and not stays))
    return outer[0] + step * (outer[0] < DEPTH), outer[1] if says is None else says


class _Tokenizer(HTMLTokenizer):
    """Hands tokens to a parser, and then, with their places and states, to `take`."""

    def __init__(self, source: str, take: Callable[[Span, str, str, Mapping[str, str], State], None]) -> None:
        super().__init__("", HTMLParser())
        self.take, self.size, self.has_tags, self.open = take, len(source), False, list[tuple[Any, State]]()
        self.stream.chunk, self.stream.chunk_size = source.replace("\r", "\n"), self.size  # in chunks, places are lost
        self.parser.container, self.parser.scripting, self.parser.tokenizer = None, False, self
        self.parser.parse_error = self.parser.tree.insert_text = lambda *_: None  # takes time
        self.parser.reset()
        self.parser.main_loop()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.token_queue, begin = list[dict[str, Any]](), 0
        while self.state():
            found = [one for one in self.token_queue if one["type"] != Token.PARSE_ERROR]
            self.token_queue.clear()
            end = self.size - self.stream.chunk_size + self.stream.chunk_offset
            if found or (self.state == self.data_state and begin < end):  # "</>" and unfinished tags are no tokens
                kind = KINDS.get(found[0]["type"], "other") if found else "other"
                data = "".join(one["data"] if kind == "text" else one.get("name") or "" for one in found)
                attributes = dict(found[0]["data"]) if kind == "start" else {}
                if kind == "start" and not self.has_tags:  # in a page, parts of a table alone would be lost
                    self.has_tags, self.parser.container = True, FRAGMENTS.get(data)
                    self.parser.container and self.parser.reset()
                yield from found
                opens, state = self._follow(), self.open[-1][1] if self.open else (0, True)
                if kind == "start" and not (opens and self.open[-1][0].name == data):
                    kind, state = "void", (state[0], _inside(state, data, attributes)[1])  # or the parser ignores it
                self.take((begin, end), kind, data, attributes, state)
                begin = end
        self.parser.container = "html"  # else "<table><svg><html>" fails an assertion of the library

    def _follow(self) -> bool:
        """Notes the elements that the parser has open, and tells whether there are new ones."""
        elements, known = self.parser.tree.open_elements, len(self.open)
        if len(elements) > DEEPEST:  # each tag takes time for each of them
            raise CorpusError(f"HTML has more than {DEEPEST} elements inside one another; close some")
        while known and (known > len(elements) or self.open[known - 1][0] is not elements[known - 1]):
            known -= 1
        del self.open[known:]
        for one in elements[known:]:
            self.open.append((one, _inside(self.open[-1][1] if self.open else (0, True), one.name, one.attributes)))
        return known < len(elements)


class Html(Document):
    """A page or a fragment; `target` is the language for `<html lang>`, None: the attribute stays.

    `texts` are paragraphs and attributes' values.
    """

    def __init__(self, source: str, target: str | None = None) -> None:
        super().__init__()
        self._source, self._target, self._blocks = source, target, list[Block]()
        start = len(source) - len(source.removeprefix("\ufeff"))
        self._stack = [Block(start)]  # what is open: a block, and what stays of it, and blocks in this ...
        _Tokenizer(source, self._take)
        self._take((len(source), len(source)), "end", "html", {}, (0, True))
        self._blocks.sort(key=lambda block: block.start)
        breaks = [place for place, char in enumerate(source) if char == "\n"]
        for block in self._blocks:
            self.places[block.key].append(bisect_left(breaks, block.first) + 1)
        self.places.pop(LANGUAGE, None)

    def _take(self, raw: Span, kind: str, data: str, attributes: Mapping[str, str], state: State) -> None:
        if ATTRIBUTES.keys() & attributes.keys() and state[1]:
            self._take_attributes(raw, data, attributes)
        if data == "html":
            self.language = self.language or attributes.get("lang") or attributes.get("xml:lang") or None
        stack, is_done = self._stack, False
        while state[0] < stack[-1].level:
            is_done = kind == "end" and data == stack[-1].name
            self._end(stack.pop(), raw[is_done])
        while state[0] > stack[-1].level:
            level, is_done = stack[-1].level + 1, kind == "start"
            stack.append(Block(raw[is_done and level % 2 == 0], level, data * (is_done and level % 2)))
        block, is_block = stack[-1], kind != "text" and bool(BLOCK.fullmatch(data))
        if block.level % 2:
            block.text += data * (kind == "text")
            block.has_blocks |= is_block
        elif is_block or (kind != "text" and len(block.nodes) + len(block.kept) > MOST_NODES):
            self._renew(raw[0], raw[1])
        elif not is_done:
            block.add(raw, kind, data)

    def _end(self, block: Block, stop: int) -> None:
        if block.has_blocks:
            self._renew(block.start, stop)
        elif block.level % 2:
            self._stack[-1].add((block.start, stop), "kept", block.text)
        elif block.finish(stop):
            self._blocks.append(block)

    def _renew(self, stop: int, start: int) -> None:
        """Ends a block, and begins the next one."""
        self._end(self._stack[-1], stop)
        self._stack[-1] = Block(start, self._stack[-1].level)

    def _take_attributes(self, raw: Span, tag: str, attributes: Mapping[str, str]) -> None:
        """Finds those that are translated."""
        kind = attributes.get({"input": "type", "meta": "name"}.get(tag, ""), "").lower()
        left = {name for name in attributes if ATTRIBUTES.get(name, set()) & {"", tag, f"{tag} {kind}"}}
        for match in ATTRIBUTE.finditer(self._source, raw[0] + 1 + len(tag), raw[1] - 1):
            name, (begin, end) = match[1].lower(), match.span("value")
            if name in left and begin >= 0:
                block = Block(begin, name=match[2] or '"')
                block.add((begin, end), "text", attributes[name])
                if block.finish(end) or "lang" in name:
                    self._blocks.append(block)
                    block.key = LANGUAGE if "lang" in name else block.key
            left.discard(name)  # the first of two counts

    def translated(self, translations: Mapping[str, Linked]) -> str:
        """Returns the HTML in the target language; a text without a translation, or the same one, stays."""
        starts = [block.start for block in self._blocks]
        known = {**translations, LANGUAGE: Linked(self._target)} if self._target else translations

        def written(begin: int, stop: int) -> str:
            parts, position = list[str](), begin
            for block in self._blocks[bisect_left(starts, begin) : bisect_left(starts, stop)]:
                new = known.get(block.key)
                if position <= block.start and block.stop <= stop and new and new.text != block.key:
                    raw = self._source[block.start : block.stop]
                    text = Layout(block, new, raw, written).rendered()
                    if quote := block.name:
                        text = text.replace(quote, f"&#{ord(quote)};")
                        text = text if self._source[block.start - 1] == quote else f"{quote}{text}{quote}"
                    parts += [self._source[position : block.start], text]
                    position = block.stop
            return "".join([*parts, self._source[position:stop]])

        return written(0, len(self._source))
