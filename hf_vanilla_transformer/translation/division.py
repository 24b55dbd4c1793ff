"""Divides texts that are too long for a model into pieces, and joins the translations of the pieces.

Time grows linearly with a text's length. Memory too, but slowly: a tokenizer takes some 200 bytes per token, and never
gets more than `CHARACTERS_AT_ONCE` of a long text.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

Encode = Callable[[list[str]], list[list[int]]]  # texts -> token ids of each, special tokens included

# Tokens of a piece at most: models are trained on sentences, and these are seldom longer.
PIECE_TOKENS = 256
CHARACTERS_AT_ONCE = 100_000
# Where a text is divided: after sentences, else after words.
ENDS = (re.compile(r"[.!?…][\"'”’)\]»]{0,3}\s+|[。！？]['\"”’」』）]{0,3}\s*"), re.compile(r"\s+"))
LEVELS = ("sentences", "words", "parts of words", "characters")
BYTES_PER_CHARACTER = 4  # in UTF-8 at most, and so the tokens of a character, of nearly all tokenizers
# Scripts that are written without spaces: kana, Chinese characters, their punctuation and full-width forms.
CJK = re.compile(r"[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")


def encode_within(encode: Encode, texts: list[str], limit: int) -> list[list[int] | None]:
    """Returns the token ids of each text; None: it has more than `limit` tokens."""
    if not texts:
        return []
    rows: list[list[int] | None] = [*encode([text[:CHARACTERS_AT_ONCE] for text in texts])]
    for index, (text, ids) in enumerate(zip(texts, rows, strict=True)):
        if ids and len(ids) <= limit and len(text) > CHARACTERS_AT_ONCE:  # a few long tokens, such as runs of spaces
            rows[index] = encode([text])[0]
    return [None if ids is None or len(ids) > limit else ids for ids in rows]


def divide(encode: Encode, text: str, limit: int, size: int = PIECE_TOKENS) -> list[list[int]]:
    """Divides a text at the ends of sentences, else at white space, else anywhere; returns token ids of each piece.

    Pieces are filled up to `size` tokens and have `limit` at most. Nothing is lost but white space at their ends.

    Raises:
        ValueError: A single character has more tokens.
    """
    special = len(encode([""])[0])
    pieces: list[list[int]] = []
    for texts in _in_groups(_Divider(encode, special, min(limit, size) - special).pieces(text)):
        for piece, ids in zip(texts, encode(texts), strict=True):
            # Joined, parts seldom have more tokens than apart.
            pieces += [ids] if len(ids) <= limit else divide(encode, piece, limit, min(limit, size) // 2)
    return pieces


def join(translations: Iterable[str]) -> str:
    """Joins the translations of pieces with spaces, and without between characters of scripts that have none."""
    joined: list[str] = []
    for translation in filter(None, map(str.strip, translations)):
        if joined and not (CJK.match(joined[-1][-1]) and CJK.match(translation)):
            joined.append(" ")
        joined.append(translation)
    return "".join(joined)


@dataclass
class _Divider:
    """Divides texts into pieces of `special` tokens and at most `room` others."""

    encode: Encode
    special: int
    room: int

    def pieces(self, text: str) -> Iterator[str]:
        """Yields pieces, filled with as many parts as fit."""
        piece, total = "", 0.0
        for part, count in self._parts(text):
            if piece and total + count > self.room:
                yield from filter(None, [piece.strip()])
                piece, total = "", 0.0
            piece += part
            total += count
        yield from filter(None, [piece.strip()])

    def _parts(self, text: str, level: int = 0) -> Iterator[tuple[str, float]]:
        """Yields parts that fit into a piece each, and their numbers of tokens; together, they are the text."""
        if level == len(LEVELS):
            raise ValueError(f"{text!r} alone has more than the {self.room + self.special} tokens of a piece")
        for texts in _in_groups(self._cut(text, level)):
            for part, count in zip(texts, self._counts(texts), strict=True):
                if count <= self.room:
                    yield part, count
                else:
                    yield from self._parts(part, level + 1)

    def _cut(self, text: str, level: int) -> Iterator[str]:
        ends: Iterable[int]
        if level < len(ENDS):
            ends = (match.end() for match in ENDS[level].finditer(text))
        else:
            step = 1 if LEVELS[level] == "characters" else max(self.room // BYTES_PER_CHARACTER - 1, 1)
            ends = range(step, len(text), step)
        start = 0
        for end in ends:
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]

    def _counts(self, parts: list[str]) -> list[float]:
        """Counts tokens, at least those that a part has within a piece; infinity: too many to be counted at once."""
        words = [part.strip() for part in parts]
        is_short = [len(word) <= CHARACTERS_AT_ONCE for word in words]
        ids = self.encode([word if short else "" for word, short in zip(words, is_short, strict=True)])
        return [
            len(own) - self.special + max(len(part) - len(word) - bool(word), 0) if short else math.inf
            for part, word, own, short in zip(parts, words, ids, is_short, strict=True)
        ]


def _in_groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Groups texts for one call of a tokenizer each."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and size + len(text) > CHARACTERS_AT_ONCE:
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group
