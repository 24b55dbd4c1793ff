"""Subtitles, .srt and .vtt: what is said in a cue is translated, and everything else stays byte for byte."""

import html
import re
import textwrap
from collections.abc import Iterable, Iterator
from itertools import chain

TIMES = re.compile(rb"\s*[\d:.,]+\s+-->\s+[\d:.,]+")
DASHES = tuple(dash.encode() for dash in "-–—")  # before what another speaker says
MARK = r"(?:<[^<>]*>|\{\\[^{}]*\})"  # <i>, <v Name>, {\an8}
TAG = re.compile(r"</?(\w+)[^<>]*>")
SPEECH = re.compile(rf"((?:{MARK}|[-–—\s])*)(.*?)((?:{MARK})*\s*)", re.DOTALL)
WIDTH = 42  # characters of a line


def speeches(lines: Iterable[bytes]) -> Iterator[tuple[list[bytes], bool]]:
    """Yields the lines that one speaker says in a cue together, all others one by one; and whether it is speech."""
    speech: list[bytes] = []
    in_cue = False
    for line in chain(lines, [b""]):
        begins = TIMES.match(line) is not None
        is_said = in_cue and bool(line.strip()) and not begins
        if speech and not (is_said and not line.lstrip().startswith(DASHES)):
            yield speech, True
            speech = []
        if is_said:
            speech.append(line)
        elif line:
            yield [line], False
        in_cue = begins or is_said


def text_of(speech: str, is_vtt: bool) -> tuple[str, str, str]:
    """Returns what stays before a text, the text, and what stays behind it; other marks are left out."""
    match = SPEECH.fullmatch(speech)
    assert match is not None  # as it may all be text
    kept = {"v", *TAG.findall(match[1])} & {"v", *TAG.findall(match[3])}  # who speaks, and tags around it all
    before, after = (TAG.sub(lambda tag: tag[0] if tag[1] in kept else "", match[side]) for side in (1, 3))
    text = " ".join(re.sub(MARK, "", match[2]).split())
    return before, html.unescape(text) if is_vtt else text, after


def speech_of(translation: str, before: str, after: str, is_vtt: bool) -> str:
    """Returns the lines of a translation, which end as those of the file do."""
    text = textwrap.fill(translation, WIDTH, break_long_words=False, break_on_hyphens=False)
    text = text.replace("\n", "\r\n") if after.endswith("\r\n") else text
    return before + (html.escape(text, quote=False) if is_vtt else text) + after
