"""Reads texts for a model: tokens of sentences, and of the pieces of those that are too long."""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .division import split_sentences
from .languages import READING, own_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Tokens of a piece at most: models are trained on sentences, and these are seldom longer.
PIECE_TOKENS = 256
CHARACTERS_AT_ONCE = 100_000  # of a text that are tokenized, to bound the memory
# What a tokenizer is asked for: ids alone, and no warnings, as long texts are divided.
ONLY_IDS = {"verbose": False, "return_attention_mask": False, "return_token_type_ids": False}
# Where a text is divided: after sentences, else after words.
ENDS = (re.compile(r"[.!?…][\"'”’)\]»]{0,3}\s+|[。！？]['\"’”」』）]{0,3}\s*"), re.compile(r"\s+"))

Encode = Callable[[list[str]], list[list[int]]]  # texts -> token ids of each, special tokens included
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
    text = text.removeprefix("\ufeff")  # a file's byte-order mark, which no model has seen
    if (code := own_code(tokenizer, text)) is not None:
        begin, text = f"{code[1]} ", text[code.end() :].lstrip()
    if language is not None:
        yield from ((gap, begin, sentence) for gap, sentence in split_sentences(text, language))
    elif text := text.strip():  # as sentences of training data are; a token of white space may change a translation
        yield "", begin, text


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
    options = {**ONLY_IDS, **options}

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


# ---- Long sentences ----
def encode_within(encode: Encode, texts: list[str], limit: int) -> list[list[int] | None]:
    """Returns the token ids of each text; None: it has more than `limit` tokens."""
    if not texts:
        return []
    rows: list[list[int] | None] = [*encode([text[:CHARACTERS_AT_ONCE] for text in texts])]
    for index, (text, ids) in enumerate(zip(texts, rows, strict=True)):
        if ids and len(ids) <= limit and len(text) > CHARACTERS_AT_ONCE:  # a few long tokens, such as runs of spaces
            rows[index] = encode([text])[0]
    return [None if ids is None or len(ids) > limit else ids for ids in rows]


def divide(encode: Encode, text: str, limit: int, begin: str = "") -> list[tuple[str, list[int]]]:
    """Divides a text at the end of a sentence near its middle, else at white space, else anywhere, and so on.

    Nothing is lost but white space at the ends of pieces. Each is tokenized behind `begin`, a target language's code,
    and has at most `limit` token ids, and `PIECE_TOKENS`. A single character with more raises `ValueError`.
    """
    limit = min(limit, PIECE_TOKENS)
    pieces: list[tuple[str, list[int]]] = []
    waiting = [text.strip()]  # the first part is the last one here
    while waiting:
        part = waiting.pop()
        (ids,) = encode_within(encode, [begin + part], limit)
        if ids is not None:
            pieces.append((part, ids))
        elif len(part) < 2:
            raise ValueError(f"{part!r} alone has more than the {limit} tokens of a piece")
        else:
            place = _near_the_middle(part)
            waiting += filter(None, (part[place:].strip(), part[:place].strip()))
    return pieces


def _near_the_middle(text: str) -> int:
    middle = len(text) // 2
    for end in ENDS:
        if places := [match.end() for match in end.finditer(text) if match.end() < len(text)]:
            return min(places, key=lambda place: abs(place - middle))
    return middle
