"""Subtitles: what is translated of them, and what stays byte for byte."""

import re
from html import unescape

import pysubs2
import pytest
import srt
import webvtt
from hypothesis import given
from hypothesis import strategies as st

from hf_vanilla_transformer.data.formats import CorpusError
from hf_vanilla_transformer.documents.links import Linked
from hf_vanilla_transformer.documents.subtitles import Subtitles
from tests.documents.linking import link, shouted, size

TIMES = "00:00:01,000 --> 00:00:02,500"
EVENTS = "Format: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text\n"
ASS = "[Script Info]\nTitle: a title\n\n[V4+ Styles]\nFormat: Name, Fontname\nStyle: Default,Arial\n\n[Events]\n"
DIALOGUE = "Dialogue: 0,0:00:01.00,0:00:02.50,Default,,0,0,0,,"
CUE = f"1\n{TIMES}\n"


def shout(source: str, form: str) -> str:
    return shouted(Subtitles(source, form))


@pytest.mark.parametrize(
    ("said", "texts", "translated"),
    [
        ("if a < 5 and b > 3", ["if a < 5 and b > 3"], "IF A < 5 AND B > 3"),
        ("MyValue<String>", ["MyValue<String>"], "MYVALUE<STRING>"),
        ("<Narrator> one", ["<Narrator> one"], "<NARRATOR> ONE"),
        ("one<br>two <BR/> three", ["one two three"], "ONE TWO THREE"),
        (r"{\i1}One{\i0}", ["One"], r"{\i1}ONE{\i0}"),
        (r"{\an8}{y:i}&lrm;<font color='red'>One</font>", ["One"], r"{\an8}{y:i}&lrm;<font color='red'>ONE</font>"),
        ("Q &amp; A, &lt;b&gt;&nbsp;c", ["Q & A, <b> c"], "Q &amp; A, &lt;B&gt; C"),  # as it was, for all players
        ("R&D", ["R&D"], "R&D"),
        ("- One.\n- Two.", ["One.", "Two."], "- ONE.\n- TWO."),
        ("<i>- One.</i>\n<i>– Two.</i>", ["One.", "Two."], "<i>- ONE.</i>\n<i>– TWO.</i>"),
        ("It is\n-5 degrees", ["It is -5 degrees"], "IT IS -5 DEGREES"),
        ("-5 degrees", ["-5 degrees"], "-5 DEGREES"),
        ("one <i>two</i> <b>three</b> four", ["one two three four"], "ONE <i>TWO</i> <b>THREE</b> FOUR"),
        ("♪ One ♪", ["One"], "♪ ONE ♪"),
        ("One.\n\nTwo.", ["One.", "Two."], "ONE.\n\nTWO."),
        ("♪ ... ♪", [], "♪ ... ♪"),
    ],
)
def test_texts_of_a_cue(said: str, texts: list[str], translated: str):
    assert Subtitles(f"{CUE}{said}\n", ".srt").texts == texts
    assert shout(f"{CUE}{said}\n", ".srt") == f"{CUE}{translated}\n"


@pytest.mark.parametrize(
    ("begin", "said", "translation", "lines"),
    [
        (CUE, "One.", "今" * 48, ["今" * 21, "今" * 21, "今" * 6]),
        (CUE, "One.", "今" * 21 + "，今", ["今" * 20, "今，今"]),
        (CUE, "One.", "가나다 " * 12, ["가나다 가나다 가나다 가나다 가나다 가나다"] * 2),  # not inside a word
        (CUE, "- One.", "abcdefghi " * 5, ["- abcdefghi abcdefghi abcdefghi abcdefghi", "abcdefghi"]),  # 41 columns
        (CUE, "One.", "a" * 50, ["a" * 50]),
        (CUE, "One.<br>Two.", "abcdefghi " * 5, ["abcdefghi abcdefghi abcdefghi abcdefghi<br>abcdefghi"]),
        (CUE.replace("\n", "\r\n"), "One.", f"{'a' * 30} {'b' * 30}", [f"{'a' * 30}\r", "b" * 30]),
        # A player of .ass breaks lines where the file doesn't, and scales them.
        (ASS + EVENTS + DIALOGUE, "one two", f"{'a' * 30} {'b' * 30}", [f"{'a' * 30} {'b' * 30}"]),
        (ASS + EVENTS + DIALOGUE, r"one\Ntwo", f"{'a' * 30} {'b' * 30}", [rf"{'a' * 30}\N{'b' * 30}"]),
        (ASS + EVENTS + DIALOGUE, rf"{'one ' * 16}\Ntwo", f"{'a' * 30} {'b' * 30}", [f"{'a' * 30} {'b' * 30}"]),
    ],
)
def test_lines_have_42_columns(begin: str, said: str, translation: str, lines: list[str]):
    document = Subtitles(begin + said, ".ass" if begin.startswith(ASS) else ".srt")
    (text,) = document.texts
    assert document.translated({text: Linked(translation)}).removeprefix(begin).split("\n") == lines


def test_tags_keep_their_order_and_go_before_the_words_behind_them():
    source = "WEBVTT\n\n00:01.000 --> 00:02.000\n<c>a</c> <00:01.500><i>red house</i> here\n"
    (text,) = Subtitles(source, ".vtt").texts
    words = {"la": "a", "maison": "house", "rouge": "red", "ici": "here"}
    origins = [text.replace(" ", "").index(of) for word, of in words.items() for _ in word]
    translated = Subtitles(source, ".vtt").translated({text: link(" ".join(words), origins, size(text))})
    assert translated.splitlines()[3] == "<c>la</c> <00:01.500><i>maison rouge</i> ici"


SRT = {
    "numbers without blank lines": f"1\n{TIMES}\nOne.\n2\n{TIMES}\nTwo\nthree.\n3\n{TIMES}\n1999\n",
    "CRLF, a mark, a place": f"\ufeff1\r\n{TIMES} X1:1 X2:2 Y1:3 Y2:4\r\nOne\r\ntwo.\r\n\r\n\r\n2\r\n{TIMES}\r\n\r\n",
    "no numbers": f"\n{TIMES.replace(',', '.')}\nOne.\n\n{TIMES}\nTwo --> three.",
    "a number is said": f"7\n{TIMES}\n1999\n\n8\n{TIMES}\n \nIn\n2000 it was\n",
}


@pytest.mark.parametrize("source", SRT.values(), ids=SRT)
def test_cues_of_srt_are_those_of_two_libraries(source: str):
    before, after = (list(srt.parse(text.lstrip("\ufeff"))) for text in (source, shout(source, ".srt")))
    assert [one.content.upper().split() for one in before] == [one.content.split() for one in after]
    assert [(one.index, one.start, one.end, one.proprietary) for one in before] == [
        (one.index, one.start, one.end, one.proprietary) for one in after
    ]
    cues = pysubs2.SSAFile.from_string(source, format_="srt")
    assert " ".join(Subtitles(source, ".srt").texts).split() == " ".join(cue.plaintext for cue in cues).split()
    assert Subtitles(source, ".srt").translated({}) == source


VTT = """WEBVTT - a title
Kind: captions
Language: de-AT

NOTE One
--
two

STYLE
::cue(b) { color: red }

REGION
id:a

first
00:01.000-->00:02.000 region:a align:left
{space}
- One.
- <b>Two</b> three.

2
00:00:03.000\t-->\t00:00:04.000
<v.loud Ann>Four &amp; five.</v> <v Bob>&lrm;Six &lt;7 &quot;8&quot;.
00:05.000 --> 00:06.000
<lang en>A</lang> <c>c</c><00:05.500> d

NOTE the end
""".replace("{space}", " ")


def test_cues_of_vtt_are_those_of_webvtt_py():
    document = Subtitles(VTT, ".vtt")
    assert document.texts == ["One.", "Two three.", "Four & five.", 'Six <7 "8".', "A c d"]
    assert document.language == "de-AT"
    assert [document.places[text] for text in document.texts[:3]] == [[18], [19], [23]]
    before, after = webvtt.from_string(VTT), webvtt.from_string(output := shout(VTT, ".vtt"))
    cues = [[(one.identifier, one.start, one.end, one.settings, one.voice) for one in file] for file in (before, after)]
    assert cues[0] == cues[1]
    assert [unescape(one.text).upper() for one in before] == [unescape(one.text) for one in after]
    assert output[: output.index("- ONE")] == VTT[: VTT.index("- One")]
    assert output.splitlines()[22:] == [
        "<v.loud Ann>FOUR &amp; FIVE.</v> <v Bob>&lrm;SIX &lt;7 &quot;8&quot;.",
        "00:05.000 --> 00:06.000",
        "<lang en>A</lang> <c>C</c> <00:05.500>D",
        "",
        "NOTE the end",
    ]
    assert document.translated({}) == VTT


def test_texts_of_a_cue_of_vtt():
    for said, translated in (
        ("I <3 you, a < b > c", "I &lt;3 YOU, A &lt; B &gt; C"),  # the standard would hide what follows a <
        ("<ruby>a<rt>x</rt></ruby> b<rt>c", "<ruby>A</ruby> B"),
        (r"C:\home &nbsp;c", r"C:\HOME C"),
    ):
        assert shout(f"WEBVTT\n\n00:01.000 --> 00:02.000\n{said}\n", ".vtt").split("\n")[3:] == [translated, ""]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_of_ass_are_those_of_pysubs2(end: str):
    said = [
        r"{\an8\fad(1,2)}One, two\Nthree{\r}",
        r"- One\N- {\i1}Two{\i0}",
        r"{\p1}m 0 0 l 1 a{\p0}",
        r"{\p2}m b 0{\p0}One\htwo {a note}three",
    ]
    translated = [
        r"{\an8\fad(1,2)}ONE, TWO THREE{\r}",
        r"- ONE\N- {\i1}TWO{\i0}",
        said[2],
        r"{\p2}m b 0{\p0}ONE TWO {a note}THREE",
    ]
    begin = f"{ASS}{EVENTS}Comment: 0,0:00:01.00,0:00:02.50,Default,,0,0,0,,stays\n"
    source, expected = (
        (begin + "".join(f"{DIALOGUE}{one}\n" for one in texts)).replace("\n", end) for texts in (said, translated)
    )
    output = shout(source, ".ass")
    assert Subtitles(source, ".ass").texts == ["One, two three", "One", "Two", "One two three"]
    assert output == expected
    before, after = (pysubs2.SSAFile.from_string(text, format_="ass") for text in (source, output))
    for one in before:
        one.text = one.text if one.is_comment or one.is_drawing else re.sub(r"\\[Nh]", " ", one.text)
    assert [(one.start, one.end, one.style) for one in before] == [(one.start, one.end, one.style) for one in after]


def test_format_says_which_field_of_ass_is_the_text():
    source = f"{ASS}Format: Start, End, Style, Text\nDialogue: 0:00:01.00,0:00:02.50,Default,One, two\n"
    assert shout(source, ".ssa") == source.replace("One, two", "ONE, TWO")


@pytest.mark.parametrize(
    ("source", "form", "line"),
    [
        ("One.\nTwo.\n", ".srt", 1),
        (f"Before\n\n1\n{TIMES}\nOne.\n", ".srt", 1),
        (f"1\n{TIMES}\nOne.\n\n2\n{TIMES.replace(',', ';')}\nTwo.\n", ".srt", 6),
        (f"1\n{TIMES}\nOne.\n\n2\n{TIMES.replace('-->', '->')}\nTwo.\n", ".srt", 6),
        (f"1\r{TIMES}\rOne.\r", ".srt", 1),
        (f"WEBVTT\n\n{TIMES.replace(',', '.')}\rOne.\n", ".vtt", 3),
        (f"{TIMES.replace(',', '.')}\nOne.\n", ".vtt", 1),
        (f"WEBVTT\n\n{TIMES}\nOne.\n", ".vtt", 3),
        (f"WEBVTT\n\n{TIMES.replace(',', '.')}\nOne.\n\nTwo.\n", ".vtt", 6),
        (f"1\n{TIMES}\nOne.\n", ".ass", 1),
        (f"{ASS}{EVENTS}{DIALOGUE[:-2]}One\n", ".ass", 10),
    ],
)
def test_what_is_in_no_cue_is_refused(source: str, form: str, line: int):
    with pytest.raises(CorpusError, match=f"^line {line}: "):
        Subtitles(source, form)


PARTS = st.sampled_from(
    ["a", "B c", "- ", "1", "\n", "\r\n", " ", "<i>", "</i>", "<br>", "{\\an8}", "<", "&amp;", "♪", "<v D>"]
)


@given(st.lists(st.lists(PARTS).map("".join), min_size=1), st.sampled_from([".srt", ".vtt", ".ass"]))
def test_only_texts_change(cues: list[str], form: str):
    if form != ".srt":
        cues = [" ".join(cue.split()) for cue in cues]
    begins = {".srt": f"1\n{TIMES}\n", ".vtt": f"\n{TIMES.replace(',', '.')}\n", ".ass": DIALOGUE}[form]
    source = {".srt": "", ".vtt": "WEBVTT\n", ".ass": ASS + EVENTS}[form] + "".join(f"{begins}{cue}\n" for cue in cues)
    assert Subtitles(source, form).translated({}) == source
    output = shout(source, form)
    assert [*map(output.count, (TIMES, DIALOGUE))] == [*map(source.count, (TIMES, DIALOGUE))]
    assert not re.search("[abc]", re.sub(re.escape(ASS + EVENTS) + r"|amp;|<br>|\\an8|Dialogue.*,,|&lt;", "", output))
