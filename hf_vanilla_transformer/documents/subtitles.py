"""Subtitles: what is said in a cue is translated, and everything else stays byte for byte.

A text is what one speaker says in a cue. Tags, overrides, dashes and notes at its ends stay there. Tags inside it,
times of karaoke among them, keep their order: each goes before the first word that comes from behind it. Readings of
ruby are left out. A character that is an entity in the source is one in the translation.
"""

import re
from collections.abc import Iterator, Mapping
from html import unescape
from itertools import pairwise

import numpy as np
import regex

from ..data.formats import CorpusError
from .links import Document, Linked, solid_size

WIDTH = 42  # columns of a line
LINES = r"(?:(?!.*-->)[^\r\n].*\n?)*+"  # up to a blank one
BLOCK = rf"(?=(?:NOTE|STYLE|REGION|Region:)(?!\S)){LINES}"
# Of each form: what begins a cue, and what isn't said up to there; what may follow the text; what players know as tags,
# breaks of lines, other blanks, and entities.
BEGINS = {
    ".srt": r"(?m)^.*?\d[:;.,]\d+[ \t]*-[ \t-]*>[ \t]*-?\d+[:;.,]\d.*\n?",
    ".vtt": r"(?m)^.*-->.*\n?",
    ".ass": r"(?m)^[ \t]*Dialogue:(?:[^,\n]*,){9}",
}
UNSAID = {
    ".srt": r"\ufeff?\s*(?:\d+\s*?\n\s*)?(?:-?\d+(?:[:.,]\d+){2,3}\s*-->\s*-?\d+(?:[:.,]\d+){2,3}.*\n?)?",
    ".vtt": rf"(?:\A\ufeff?(?=WEBVTT(?!\S)){LINES}|(?!\A))(?:[ \t]*\r?\n|{BLOCK})*+(?:.*\n(?=.*-->))?"
    r"(?:\s*(?:\d+:)?\d+:\d+\.\d+\s*-->\s*(?:\d+:)?\d+:\d+\.\d+.*\n?)?",
    ".ass": r"(?:\A(?=(?s:.*)\[(?i:script info|events)\])|(?!\A))(?:(?![ \t]*Dialogue:)(?:.*\n|.+))*+"
    r"(?:.*?:(?:[^,\n]*,){9})?",
}
FOLLOWS = {".srt": r"(?m)^[ \t]*\d+\s*\Z", ".vtt": r"(?ms)^\r?$.*", ".ass": r"(?s)\r?\n.*"}
TAGS = {
    ".srt": r"<\s*(?:/\s*)?(?i:[bisu]|font)(?:\s[^<>]*)?/?>|\{(?:\\|[CcFfoPSsYy]:)[^{}]*\}|&[lr]rm;",
    ".vtt": r"</?[A-Za-z.][^<>]*>|<\d+:[\d:.]+>|\{\\[^{}]*\}|&[lr]rm;",
    ".ass": r"\{[^{}]*\\p0*[1-9][^{}]*\}(?:[^{]|\{(?![^{}]*\\p0))*|\{[^{}]*\}",  # the former is a drawing
}
BREAKS = {".srt": r"\r?\n|(?i:<br\s*/?>)|\\N", ".vtt": r"\r?\n", ".ass": r"\\[Nn]"}
BLANKS = {".srt": r"&nbsp;|\\h", ".vtt": "&nbsp;", ".ass": r"\\h"}
ENTITIES = {".srt": r"&(?:amp|lt|gt|quot|apos|#\d+|#x[\da-fA-F]+);", ".vtt": r"&#?\w+;?", ".ass": "(?!)"}
# Where another speaker begins: behind a blank line, behind a break before a dash, and at <v>.
SPEAKER = r"\n\s*?\n|(?:{})(?=(?:<[^<>\r\n]*>|\{{[^{{}}\r\n]*\}}|[ \t])*[-–—](?!\d))|(?!\A)(?=<{}[\s.>])"
UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}ー"  # between these characters, a line may end
WORD = regex.compile(rf"([ \t\n]*)([\p{{Ps}}\p{{Pi}}]*[{UNSPACED}][\p{{Pe}}\p{{Pf}}\p{{Po}}ー]*|[^ \t\n{UNSPACED}]+)")
WIDE = regex.compile(r"[\p{EA=W}\p{EA=F}]")


def _columns(text: str) -> int:
    return len(text) + len(WIDE.findall(text))


class Speech:
    """What one speaker says in a cue, and what isn't said before; `end` breaks lines where the source has only one."""

    def __init__(self, unsaid: str, source: str, form: str, end: str) -> None:
        spoken = re.sub(r"(?s)<rt\b.*?(?:</rt>|(?=</ruby>|\s*+\Z))", "", source) if "<ruby" in source else source
        tags = rf"({TAGS[form]})|({BREAKS[form]}|{BLANKS[form]})"
        said = re.sub(rf"\A(?:{tags}|[\s♪♫]|[–—-](?!\d))*+", "", spoken)
        parts = re.split(tags, said)  # by turns: words; a tag or None; a blank or None
        while len(parts) > 1 and not parts[-1].strip(" \t\r\n♪♫"):
            del parts[-3:]
        parts[-1] = parts[-1].rstrip(" \t\r\n♪♫")
        self.source, self.before = unsaid + source, unsaid + spoken.removesuffix(said)
        self.after = said[len("".join(filter(None, parts))) :]
        self.end = next((one for one in parts[2::3] if one and re.fullmatch(BREAKS[form], one)), end)
        self.escapes = {"&": "&amp;", "<": "&lt;", ">": "&gt;"} if form == ".vtt" else {}
        self.escapes |= {unescape(one): one for one in re.findall(ENTITIES[form], said)}
        lines = re.split(BREAKS[form], re.sub(TAGS[form], "", said)) if form == ".ass" else []
        self.width = max(WIDTH, *map(_columns, lines), 0)  # a player scales the lines of .ass
        self.text, self.tags = "", list[tuple[int, str]]()
        for words, tag, blank in zip(parts[::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True):
            self.text += re.sub(ENTITIES[form], lambda one: unescape(one[0]), words) + (" " if blank else "")
            self.tags += [(solid_size(self.text), tag)] if tag else []
        self.text = " ".join(self.text.split()) if any(map(str.isalnum, self.text)) else ""

    def translated(self, translations: Mapping[str, Linked]) -> str:
        """Returns the translation with the tags, in lines of up to `width` columns; the source if there is none."""
        if not self.text or (translation := translations.get(self.text)) is None:
            return self.source
        words = WORD.findall(translation.text.strip())
        sizes = np.array([solid_size(word) or 1 for _, word in words], dtype=int)
        ends, tags = sizes.cumsum(), [["", ""] for _ in range(len(words) + 1)]  # before and behind a word's space
        for place, tag in self.tags:
            later = translation.shares(place, solid_size(self.text), ends - sizes, ends) > 0.5
            sides = tags[int(later.argmax()) if later.any() else -1]
            sides[bool(sides[1]) or tag[:2] != "</"] += tag
        written, column = self.before, (start := len(self.before) - len(self.before.rstrip(" –—-")))
        for (space, word), (last, tag) in zip([*words, ("", "")], tags, strict=True):
            gap = " " if space else ""
            if self.end and word and column > start and column + len(gap) + _columns(word) > self.width:
                gap, column = self.end, -len(self.end)
            column += len(gap) + _columns(word)
            written += last + gap + tag + "".join(self.escapes.get(one, one) for one in word)
        return written + self.after


class Subtitles(Document):
    """Subtitles as a `Document`: a `source` of the `form` .srt, .vtt, .ass or .ssa.

    One with another form, or text that is in no cue, raises `CorpusError`.
    """

    def __init__(self, source: str, form: str) -> None:
        super().__init__()
        form = form.replace("ssa", "ass")
        language = re.match(r"\ufeff?WEBVTT.*\n(?:[^\r\n].*\n)*?Language:[ \t]*([\w-]+)", source)
        self.language = language and language[1]
        self.speeches, line = list[Speech](), 1
        for unsaid, cue in _cues(source, form):
            end = "\r\n" if unsaid.endswith("\r\n") else "\n" * unsaid.endswith("\n")
            speakers = re.finditer(SPEAKER.format(BREAKS[form], "v" if form == ".vtt" else "(?!)"), cue)
            for begin, stop in pairwise([0, *(one.end() for one in speakers), len(cue)]):
                speech = Speech("" if begin else unsaid, cue[begin:stop], form, end)
                if speech.text:
                    self.places[speech.text].append(line + speech.before.count("\n"))
                self.speeches.append(speech)
                line += speech.source.count("\n")
        self.is_linked = any(speech.tags for speech in self.speeches)

    def translated(self, translations: Mapping[str, Linked]) -> str:
        """Returns the file in the target language; a text without a translation stays as it is."""
        return "".join(speech.translated(translations) for speech in self.speeches)


def _cues(source: str, form: str) -> Iterator[tuple[str, str]]:
    """Yields what isn't said, and what is said in the cue behind it."""
    names = re.findall(r"(?m)^[ \t]*Format:(.*,)[ \t]*Text\b", "Format:,,,,,,,,,Text\n" + source)[-1]
    begins, unsaid = (one[form].replace("{9}", f"{{{names.count(',')}}}") for one in (BEGINS, UNSAID))
    begin, size, cues = 0, len(source), [one.span() for one in re.finditer(begins, source)]
    for (_, end), (stop, _) in pairwise([*cues, (size, size), (size, size)]):
        known = re.compile(unsaid).match(source, begin, end)
        if (place := known.end() if known else begin) < end or "\r" in source[begin:end].replace("\r\n", ""):
            line = source.count("\n", 0, min(place, end - 1)) + 1
            raise CorpusError(f"line {line}: text in no cue of {form}, wrong times or fields, or CR alone; correct it")
        cue = re.sub(FOLLOWS[form] if form != ".srt" or stop < size else r"\Z", "", source[end:stop])
        yield source[begin:end], cue
        begin = end + len(cue)
