"""What a model reads of each text: sentences of paragraphs, target languages, and pieces of what is too long."""

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from ..errors import did_you_mean, install
from .pieces import Encode, divide, join, tokenize

try:
    import sentencex
except ImportError:  # an extra
    sentencex = None

# What a text begins with where a model has several target languages, ">>deu<<".
CODE = re.compile(r"\s*(>>[^\s<>]+<<)")
LINE_BREAKS = re.compile(r"([\r\n]+)")
CODES_PER_ERROR = 10
# Held while any tokenizer reads texts: those with two sides, such as MarianTokenizer, switch from one to the other and
# back for a target, and padding and truncation of the others are settings that one call after the other changes.
_READING = threading.RLock()


Namer = Callable[[Sequence[int]], list[str]]  # ids -> tokens


class Piece(NamedTuple):
    """What is translated at a time: a sentence, nearly always.

    Attributes:
        text: The index of its text.
        token_ids: Its tokens.
        gap: What stands before it in the text, where that has to stay: line breaks, or nothing.
        prefix: Tokens that its translation has to begin with.
    """

    text: int
    token_ids: list[int]
    gap: str = ""
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True)
class Reader:
    """Makes pieces of texts.

    Attributes:
        tokenizer: The model's.
        limit: Tokens of a piece at most.
        target_code: What each text begins with that has no target language of its own, ">>deu<<" say, or nothing.
        sentence_language: The language by whose rules texts are split into sentences; None: they aren't.
    """

    tokenizer: PreTrainedTokenizerBase
    limit: int
    target_code: str = ""
    sentence_language: str | None = None

    def pieces(
        self, texts: Sequence[str], prefixes: Sequence[tuple[int, ...]], first: int = 0
    ) -> tuple[list[Piece], dict[int, int]]:
        """Divides and tokenizes texts; one that is empty or white space has no pieces.

        Args:
            texts: The texts.
            prefixes: For each, the tokens that its translation has to begin with.
            first: The number of the first text.

        Returns:
            The pieces, and for the index of each text that has something too long the pieces that it became.
        """
        rows = [(index, *row) for index, text in enumerate(texts) for row in self._sentences(text)]
        encoded = tokenize(self._encode, [_with_code(code, sentence) for _, _, code, sentence in rows], self.limit)
        pieces: list[Piece] = []
        divided: dict[int, int] = {}
        begun: set[int] = set()
        for (place, gap, code, sentence), ids in zip(rows, encoded, strict=True):
            index = first + place
            parts = self._divided(code, sentence) if ids is None else [ids]
            if len(parts) > 1:
                divided[index] = divided.get(index, 0) + len(parts)
            for number, part in enumerate(parts):
                pieces.append(
                    Piece(index, part, "" if number else gap, () if index in begun else prefixes[index - first])
                )
                begun.add(index)
        return pieces, divided

    def _sentences(self, text: str) -> Iterator[tuple[str, str, str]]:
        """Yields what stands before each sentence, its target language, and the sentence."""
        code, rest = self.target_code, text
        if target_codes(self.tokenizer) and (match := CODE.match(text)):
            code, rest = match[1], text[match.end() :].lstrip()
        if self.sentence_language is not None:
            yield from ((gap, code, sentence) for gap, sentence in split_sentences(rest, self.sentence_language))
        elif rest.strip():
            yield "", code, rest

    def _divided(self, code: str, sentence: str) -> list[list[int]]:
        return divide(lambda parts: self._encode([_with_code(code, part) for part in parts]), sentence, self.limit)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return encoder(self.tokenizer)(texts)


def encoder(tokenizer: PreTrainedTokenizerBase, *, is_target: bool = False, **options: Any) -> Encode:
    """Returns the function that tokenizes sources, or targets, from any thread.

    Args:
        tokenizer: The tokenizer.
        is_target: Whether the texts are in the target language.
        **options: For the tokenizer.
    """
    if isinstance(tokenizer, PreTrainedTokenizerBase):  # long texts are divided, so no warning is due
        options = {"verbose": False, "return_attention_mask": False, "return_token_type_ids": False, **options}

    def encode(texts: list[str]) -> list[list[int]]:
        with _READING:
            if not is_target:
                return tokenizer(texts, **options)["input_ids"]
            try:
                return tokenizer(text_target=texts, **options)["input_ids"]
            finally:  # after an error, transformers leaves it on the target's side
                getattr(tokenizer, "_switch_to_input_mode", lambda: None)()

    return encode


def namers(tokenizer: PreTrainedTokenizerBase) -> tuple[Namer, Namer]:
    """Returns what names the tokens of a source and those of a target, each by its own vocabulary if there are two."""
    if not getattr(tokenizer, "separate_vocabs", False):
        return (lambda ids: list(tokenizer.convert_ids_to_tokens(ids)),) * 2
    return _namer(tokenizer.get_vocab()), _namer(tokenizer.target_encoder)


def _namer(vocabulary: Mapping[str, int]) -> Namer:
    names = {number: token for token, number in vocabulary.items()}
    return lambda ids: [names.get(number, "") for number in ids]


def _with_code(code: str, text: str) -> str:
    return f"{code} {text}" if code else text


# ---- Target languages ----
def target_codes(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns the codes of a model with several target languages, ">>deu<<" and so on; none where there is but one."""
    return list(getattr(tokenizer, "supported_language_codes", None) or [])


def target_code(tokenizer: PreTrainedTokenizerBase, target_lang: str) -> str:
    """Returns the code of a target language.

    Args:
        tokenizer: The model's.
        target_lang: The language as the model has it, such as "deu" or ">>deu<<".

    Raises:
        ValueError: The model has no such target language, or no codes at all.
    """
    codes = target_codes(tokenizer)
    if not codes:
        raise ValueError(
            f"target_lang is {target_lang!r}, but the tokenizer has no codes of target languages, such as >>deu<<; "
            "leave it out"
        )
    code = target_lang if target_lang.startswith(">>") else f">>{target_lang}<<"
    if code not in codes:
        raise ValueError(
            f"target_lang is {target_lang!r}, but the model's codes are {_some(codes)}{did_you_mean(code, codes)}"
        )
    return code


def check_target_codes(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], first: int = 0) -> None:
    """Checks that each text begins with a target language, where the model has several.

    Args:
        tokenizer: The model's.
        texts: The texts.
        first: The number of the first one, for errors.

    Raises:
        ValueError: One has none, or one that the model doesn't have.
    """
    if not (codes := target_codes(tokenizer)):
        return
    known = set(codes)
    for index, text in enumerate(texts, start=first):
        if not text.strip():
            continue
        if (match := CODE.match(text)) is None:
            raise ValueError(
                f"the model has several target languages, and sentences[{index}] doesn't say which; give target_lang, "
                f"or begin the text with its code: {_some(codes)}"
            )
        if match[1] not in known:
            raise ValueError(
                f"sentences[{index}] begins with {match[1]}, but the model's codes are {_some(codes)}"
                f"{did_you_mean(match[1], codes)}"
            )


def _some(codes: list[str]) -> str:
    more = f" and {len(codes) - CODES_PER_ERROR:,} more" if len(codes) > CODES_PER_ERROR else ""
    return ", ".join(codes[:CODES_PER_ERROR]) + more


# ---- Sentences ----
def check_splitting(language: str | None) -> None:
    """Checks that texts can be split into sentences.

    Args:
        language: The texts' language, by its two letters in ISO 639-1; None: nothing is to be split.

    Raises:
        ValueError: It is something else.
        ImportError: sentencex isn't installed.
    """
    if language is None:
        return
    if not isinstance(language, str) or not re.fullmatch("[a-z]{2}", language):
        raise ValueError(
            f'split_sentences is {language!r}; give the texts\' language by its two letters (ISO 639-1), "en" say'
        )
    if sentencex is None:
        raise ImportError(f"split_sentences needs sentencex, which isn't installed: {install('sentences')}")


def split_sentences(text: str, language: str) -> Iterator[tuple[str, str]]:
    """Splits a text into sentences, none of which goes over the end of a line.

    Args:
        text: The text.
        language: Its language, in two letters.

    Yields:
        Each sentence, and the line breaks before it.
    """
    assert sentencex is not None, "check_splitting comes first"
    gap = ""
    for number, part in enumerate(LINE_BREAKS.split(text.strip())):
        if number % 2:
            gap += part
            continue
        for sentence in sentencex.segment(language, part):
            if sentence.strip():
                yield gap, sentence.strip()
                gap = ""


def join_pieces(pieces: Sequence[tuple[str, str]]) -> str:
    """Joins translations, each with the line breaks that stand before it."""
    joined: list[str] = []
    group: list[str] = []
    for gap, translation in pieces:
        if gap:
            joined += [join(group), gap]
            group = []
        group.append(translation)
    return "".join([*joined, join(group)])
