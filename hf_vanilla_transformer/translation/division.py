"""Divides texts into sentences, and joins the translations of sentences and pieces."""

import re
from collections.abc import Iterable, Iterator, Sequence

import regex

from ..errors import install

try:
    import sentencex
except ImportError:  # an extra
    sentencex = None

UNDETERMINED = "und"  # BCP 47's code where the language isn't known
# White space, or in scripts without it nothing, between sentences: behind what Unicode says ends one, and quotation
# marks and brackets, unless a small letter follows; not behind a single letter and a dot ("J. Smith", "z.B.").
SENTENCE_END = regex.compile(
    r"""(?<=[\p{STerm}…](?<!(?:^|[\s.(])\p{L}\.)["'\p{Pe}\p{Pf}]*)\s+(?!\p{Ll})
    | (?<=[。！？｡]["'\p{Pe}\p{Pf}]*)(?!["'\p{Pe}\p{Pf}。！？｡]|\s)""",
    regex.VERBOSE,
)
# Scripts that are written without spaces: kana, Chinese characters, their punctuation and full-width forms.
CJK = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")


def check_splitting(language: str | None) -> None:
    """Checks the language by whose rules texts are split into sentences; raises `ValueError` or `ImportError`."""
    if language in (None, UNDETERMINED):
        return
    if not isinstance(language, str) or not re.fullmatch("[a-z]{2}", language):
        raise ValueError(
            f"split_sentences is {language!r}; give the language of the texts in two letters (ISO 639-1), such as "
            f'"en", or "{UNDETERMINED}" for rules that need no language'
        )
    if sentencex is None:
        raise ImportError(f"split_sentences needs sentencex, and it isn't installed: {install('sentences')}")


def sentence_rules(code: str | None) -> str:
    """Returns what `split_sentences` is for texts in a language that a model or a document names; None: unknown."""
    language = base_language(code or "")
    return language if len(language) == 2 and sentencex is not None else UNDETERMINED


def base_language(code: str) -> str:
    """Returns the language that a name means, in two letters if it has a code of two: "de" for "deu_Latn", "de-AT"."""
    language = re.split("[-_]", code.strip("<>"))[0].lower()
    try:
        from babel.core import get_global  # an extra, as what has languages of three letters
    except ImportError:
        return language
    return get_global("language_aliases").get(language, language) if len(language) == 3 else language


def split_sentences(text: str, language: str) -> Iterator[tuple[str, str]]:
    """Yields the sentences of a text, the first of a line with the white space since the last sentence."""
    gap = ""
    for line in text.splitlines(keepends=True):
        sentences = line.lstrip()
        gap += line[: len(line) - len(sentences)]
        for sentence in filter(str.strip, _sentences_of(sentences.rstrip(), language)):
            yield gap, sentence.strip()
            gap = ""
        gap += sentences[len(sentences.rstrip()) :]


def _sentences_of(line: str, language: str) -> Iterable[str]:
    if language == UNDETERMINED:
        return SENTENCE_END.split(line)
    assert sentencex is not None, "check_splitting comes first"
    return sentencex.segment(language, line)


def join_segments(translations: Sequence[tuple[str, str]]) -> str:
    """Joins the translations of a text's segments, each with the white space before it if it begins a line."""
    joined: list[str] = []
    group: list[str] = []
    for gap, translation in translations:
        if gap:
            joined += [join(group), gap]
            group = []
        group.append(translation)
    return "".join([*joined, join(group)])


def join(translations: Iterable[str]) -> str:
    """Joins the translations of pieces with spaces, and without between characters of scripts that have none."""
    joined: list[str] = []
    for translation in filter(None, map(str.strip, translations)):
        if joined and not (CJK.match(joined[-1][-1]) and CJK.match(translation)):
            joined.append(" ")
        joined.append(translation)
    return "".join(joined)
