"""Reads texts for a model: sentences of paragraphs, target languages, and pieces of sentences that are too long."""

import functools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import regex

from ..errors import did_you_mean, install, named
from .division import Encode, divide, encode_within, join

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

try:
    import sentencex
except ImportError:  # an extra
    sentencex = None

# The target language at the beginning of a text, ">>deu<<", for a model with several.
CODE = re.compile(r"\s*(>>[^\s<>]+<<)")
CODES_PER_ERROR = 10
UNDETERMINED = "und"  # BCP 47's code where the language isn't known
# White space, or in scripts without it nothing, between sentences: behind what Unicode says ends one, and quotation
# marks and brackets, unless a small letter follows; not behind a single letter and a dot ("J. Smith", "z.B.").
SENTENCE_END = regex.compile(
    r"""(?<=[\p{STerm}…](?<!(?:^|[\s.(])\p{L}\.)["'\p{Pe}\p{Pf}]*)\s+(?!\p{Ll})
    | (?<=[。！？｡]["'\p{Pe}\p{Pf}]*)(?!["'\p{Pe}\p{Pf}。！？｡]|\s)""",
    regex.VERBOSE,
)
# Held while any tokenizer reads texts: MarianTokenizer and the like switch to the target's side and back, and padding
# and truncation of the others are settings that one call after the other changes.
READING = threading.RLock()
if hasattr(os, "register_at_fork"):  # a forked process has no other thread that would release it
    os.register_at_fork(before=READING.acquire, after_in_parent=READING.release, after_in_child=READING.release)

Namer = Callable[[Sequence[int]], list[str]]  # ids -> tokens


class Segment(NamedTuple):
    """A part of a text that is translated as one, nearly always a sentence."""

    text: int  # the number of its text
    token_ids: list[int]
    gap: str = ""  # white space before it in the text, if it is at the beginning of a line
    prefix: tuple[int, ...] = ()  # tokens that its translation has to begin with


def read_segments(
    tokenizer: "PreTrainedTokenizerBase",
    texts: Mapping[int, str],
    limit: int,
    begin: str = "",
    language: str | None = None,
) -> tuple[list[Segment], dict[int, int]]:
    """Divides and tokenizes texts, by their numbers; a sentence of which the tokenizer leaves nothing has no tokens.

    A segment has `limit` tokens at most, and begins with its text's own code, or else with `begin`. Texts are split
    into sentences by the rules of `language`, unless it is None. Returns the segments, in the order of the texts; and
    for the number of each text with something too long, the number of its pieces.
    """
    nothing = functools.cache(lambda begin: encoder(tokenizer)([begin])[0])
    segments: list[Segment] = []
    divided: dict[int, int] = {}
    for number, gap, own, parts in _divided(tokenizer, texts, limit, begin, language):
        # SentencePiece drops invisible characters.
        pieces = [ids for _, ids in parts if ids != nothing(own)]
        if len(pieces) > 1:
            divided[number] = divided.get(number, 0) + len(pieces)
        segments += [Segment(number, ids, "" if place else gap) for place, ids in enumerate(pieces or [[]])]
    return segments, divided


def without_empty(segments: Iterable[Segment]) -> tuple[list[Segment], dict[int, str]]:
    """Leaves out segments without tokens, and hands the white space before them on to the next one of the text.

    Returns the others, and for the number of each text that ends with empty ones, the white space before these.
    """
    kept: list[Segment] = []
    left: dict[int, str] = {}
    for one in segments:
        gap = left.pop(one.text, "") + one.gap
        if one.token_ids:
            kept.append(one._replace(gap=gap))
        else:
            left[one.text] = gap
    return kept, left


def _divided(
    tokenizer: "PreTrainedTokenizerBase", texts: Mapping[int, str], limit: int, begin: str, language: str | None
) -> Iterator[tuple[int, str, str, list[tuple[str, list[int]]]]]:
    """Yields, for each sentence: its text's number, the white space before it, its beginning, and its pieces."""
    encode = encoder(tokenizer)
    rows = [(number, *row) for number, text in texts.items() for row in _sentences(tokenizer, text, begin, language)]
    encoded = encode_within(encode, [own + sentence for _, _, own, sentence in rows], limit)
    for (number, gap, own, sentence), ids in zip(rows, encoded, strict=True):
        pieces = [(sentence, ids)] if ids is not None else divide(encode, sentence, limit, own)
        yield number, gap, own, pieces


def _sentences(
    tokenizer: "PreTrainedTokenizerBase", text: str, begin: str, language: str | None
) -> Iterator[tuple[str, str, str]]:
    """Yields the white space before each sentence, what the model reads before it, and the sentence."""
    if (code := own_code(tokenizer, text)) is not None:
        begin, text = f"{code[1]} ", text[code.end() :].lstrip()
    if language is not None:
        yield from ((gap, begin, sentence) for gap, sentence in split_sentences(text, language))
    elif text.strip():
        yield "", begin, text


def begun(tokenizer: "PreTrainedTokenizerBase", text: str, begin: str) -> str:
    """Returns a text with what the model reads before it; one with a code of its own keeps that."""
    return text if own_code(tokenizer, text) else begin + text


class Piece(NamedTuple):
    """A part of a text that is translated by itself: its text, its tokens, and the line breaks before it."""

    text: str
    num_tokens: int
    gap: str = ""


def pieces_of(tokenizer: "PreTrainedTokenizerBase", text: str, limit: int, language: str | None = None) -> list[Piece]:
    """Divides a text as `read_segments` does; one that begins with a target language's code stays as it is."""
    if own_code(tokenizer, text):
        return [Piece(text, len(encoder(tokenizer)([text])[0]))]
    return [
        Piece(part, len(ids), "" if place else gap)
        for _, gap, _, parts in _divided(tokenizer, {0: text}, limit, "", language)
        for place, (part, ids) in enumerate(parts)
    ]


def encoder(tokenizer: "PreTrainedTokenizerBase", *, is_target: bool = False, **options: object) -> Encode:
    """Returns the function that tokenizes sources, or targets, from any thread; `options` are the tokenizer's."""
    # Long texts are divided, so no warning is due.
    options = {"verbose": False, "return_attention_mask": False, "return_token_type_ids": False, **options}

    def encode(texts: list[str]) -> list[list[int]]:
        with READING:
            if not is_target:
                return tokenizer(texts, **options)["input_ids"]
            try:
                return tokenizer(text_target=texts, **options)["input_ids"]
            finally:  # after an error, transformers leaves it on the target's side
                getattr(tokenizer, "_switch_to_input_mode", lambda: None)()

    return encode


def namers(tokenizer: "PreTrainedTokenizerBase") -> tuple[Namer, Namer]:
    """Returns what names the tokens of a source and those of a target, each by its own vocabulary if there are two."""
    if not getattr(tokenizer, "separate_vocabs", False):
        return (lambda ids: list(tokenizer.convert_ids_to_tokens(ids)),) * 2
    source, target = (
        {number: token for token, number in vocabulary.items()}
        for vocabulary in (tokenizer.get_vocab(), tokenizer.target_encoder)
    )
    return (lambda ids: [source.get(one, "") for one in ids]), (lambda ids: [target.get(one, "") for one in ids])


# ---- Target languages ----
def target_codes(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Returns the codes of a model with several target languages, ">>deu<<" and so on; none if it has only one."""
    return list(getattr(tokenizer, "supported_language_codes", None) or [])


def own_code(tokenizer: "PreTrainedTokenizerBase", text: str) -> re.Match[str] | None:
    """Finds the code of a target language at the beginning of a text for a model with several."""
    return CODE.match(text) if target_codes(tokenizer) else None


def target_code(tokenizer: "PreTrainedTokenizerBase", tgt_lang: str) -> str:
    """Returns the code of a target language, given as "deu" or ">>deu<<"; raises `ValueError`."""
    codes = target_codes(tokenizer)
    if not codes:
        raise ValueError(
            f"tgt_lang is {tgt_lang!r}, but the tokenizer has no codes of target languages, such as >>deu<<; leave it "
            "out"
        )
    code = tgt_lang if tgt_lang.startswith(">>") else f">>{tgt_lang}<<"
    if code not in codes:
        raise ValueError(
            f"tgt_lang is {tgt_lang!r}, but the model's codes are {named(codes, CODES_PER_ERROR)}"
            f"{did_you_mean(code, codes)}"
        )
    return code


def check_target_codes(
    tokenizer: "PreTrainedTokenizerBase", texts: Iterable[str], first: int = 0, *, needed: bool = True
) -> None:
    """Checks, for a model with several target languages, the codes that texts begin with.

    One that the model doesn't have, or none where that is `needed`, raises `ValueError`.
    """
    if not (codes := target_codes(tokenizer)):
        return
    for index, text in enumerate(texts, start=first):
        match = CODE.match(text)
        if match is None and needed and text.strip():
            raise ValueError(
                f"the model has several target languages, and sentences[{index}] doesn't say which; give tgt_lang, "
                f"or begin the text with its code: {named(codes, CODES_PER_ERROR)}"
            )
        if match is not None and match[1] not in codes:
            raise ValueError(
                f"sentences[{index}] begins with {match[1]}, but the model's codes are {named(codes, CODES_PER_ERROR)}"
                f"{did_you_mean(match[1], codes)}"
            )


# ---- Sentences ----
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
