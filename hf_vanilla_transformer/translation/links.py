"""Which character of a text each character of its translation comes from, by the model's attention.

White space isn't counted: a tokenizer, a browser and a joined text may each have other white space.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from .backend import Translation
from .decoding import source_limit
from .reading import Piece, join_segments, pieces_of
from .translator import Translator


def solid_size(text: str) -> int:
    """Returns the number of a text's characters that aren't white space."""
    return sum(map(len, text.split()))


@dataclass(frozen=True, eq=False)
class Linked:
    """A translation, and where each of its characters comes from.

    Attributes:
        text: The translation.
        origins: For each of its N characters the number of one in the source, (N,).
        source_size: Characters of the source.
    """

    text: str
    origins: NDArray[np.float64]
    source_size: int


def linked(tokenizer: PreTrainedTokenizerBase, source: str, translation: Translation) -> Linked:
    """Links a translation with its source: a token's characters come from the middle of the token it attends to most.

    Without alignments, both are taken to have the same order.
    """
    size, number = solid_size(source), solid_size(translation.text)
    origins = np.linspace(0, size, number, endpoint=False)
    if (one := translation.alignment) is not None and size and number:
        sources = _ends(tokenizer, one.source_ids, size, use_source_tokenizer=True)
        targets = _ends(tokenizer, one.target_ids, number)
        is_spelled = np.diff(sources, prepend=0) > 0  # special tokens aren't
        best = np.where(is_spelled, one.weights.double().numpy(), -1).argmax(axis=1)
        middles = (sources + np.concatenate([[0], sources[:-1]])) / 2
        origins = middles[best][np.searchsorted(targets, np.arange(number), side="right").clip(max=len(best) - 1)]
    return Linked(translation.text, origins, size)


def _ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], size: int, **options: bool) -> NDArray[np.float64]:
    """Returns the number of characters up to the end of each token."""
    texts = (tokenizer.decode(list(ids[: end + 1]), skip_special_tokens=True, **options) for end in range(len(ids)))
    ends = np.maximum.accumulate(list(map(solid_size, texts)))  # a part of a character may look like one
    return ends * (size / max(ends[-1], 1))  # and a tokenizer may spell a text otherwise


def join_linked(pieces: Iterable[Piece], translations: Sequence[Linked]) -> Linked:
    """Joins the translations of a text's pieces."""
    begins = np.cumsum([0, *(one.source_size for one in translations)])
    text = join_segments([(piece.gap, one.text) for piece, one in zip(pieces, translations, strict=True)])
    origins = [begin + one.origins for begin, one in zip(begins, translations, strict=False)]
    return Linked(text, np.concatenate([np.zeros(0), *origins]), int(begins[-1]))


def translate_linked(
    translator: Translator, texts: Sequence[str], language: str | None = None, **options: Any
) -> list[Linked]:
    """Translates texts in pieces and links them with their translations.

    Args:
        translator: Of any model.
        texts: The texts.
        language: By whose rules they are split into sentences; None: they aren't.
        **options: For the translator.
    """
    limit = source_limit(translator.model, options.get("max_source_tokens"), translator.tokenizer)
    divided = [pieces_of(translator.tokenizer, text, limit, language) for text in texts]
    rows = iter(linked_rows(translator, [piece.text for pieces in divided for piece in pieces], **options))
    return [join_linked(pieces, [next(rows)[0] for _ in pieces]) for pieces in divided]


def linked_rows(
    translator: Translator, texts: list[str], *, alignments: bool = True, **options: Any
) -> list[list[Linked]]:
    """Links texts with their translations, one of each or `n_best`; by `alignments`, if the model shows attention."""
    try:
        rows = translator(texts, alignments=alignments, **options)
    except ValueError:  # no attention; any other error comes again
        rows = translator(texts, **options)
    listed = (row if isinstance(row, list) else [Translation(row, 0) if isinstance(row, str) else row] for row in rows)
    return [[linked(translator.tokenizer, text, one) for one in row] for text, row in zip(texts, listed, strict=True)]
