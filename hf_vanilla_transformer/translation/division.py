"""Divides texts that are too long for a model into pieces, and joins the translations of the pieces."""

import re
from collections.abc import Callable, Iterable

Encode = Callable[[list[str]], list[list[int]]]  # texts -> token ids of each, special tokens included

# Tokens of a piece at most: models are trained on sentences, and these are seldom longer.
PIECE_TOKENS = 256
CHARACTERS_AT_ONCE = 100_000  # of a text that are tokenized, to bound the memory
# Where a text is divided: after sentences, else after words.
ENDS = (re.compile(r"[.!?…][\"'”’)\]»]{0,3}\s+|[。！？]['\"’”」』）]{0,3}\s*"), re.compile(r"\s+"))
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
    """Returns where to divide a text."""
    middle = len(text) // 2
    for end in ENDS:
        if places := [match.end() for match in end.finditer(text) if match.end() < len(text)]:
            return min(places, key=lambda place: abs(place - middle))
    return middle


def join(translations: Iterable[str]) -> str:
    """Joins the translations of pieces with spaces, and without between characters of scripts that have none."""
    joined: list[str] = []
    for translation in filter(None, map(str.strip, translations)):
        if joined and not (CJK.match(joined[-1][-1]) and CJK.match(translation)):
            joined.append(" ")
        joined.append(translation)
    return "".join(joined)
