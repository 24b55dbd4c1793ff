"""Which characters of a text each part of its translation comes from, by the model's attention.

White space isn't counted: a tokenizer, a browser and a joined text may each have other white space.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..translation.backend import Translation
from ..translation.decoding import source_limit
from ..translation.reading import Piece, check_splitting, join_segments, pieces_of
from ..translation.translator import Translator

if TYPE_CHECKING:  # an exported model is translated without
    from transformers import PreTrainedTokenizerBase

Numbers = NDArray[np.float64]
MOST_SLICES = 200  # of a text whose model shows no attention


def solid_size(text: str) -> int:
    """Returns the number of a text's characters that aren't white space."""
    return sum(map(len, text.split()))


@dataclass(frozen=True, eq=False)
class Linked:
    """A translation that is linked with its source."""

    text: str
    sizes: tuple[int, int]  # characters of the source and of the translation
    parts: tuple[tuple[Numbers, Numbers, Numbers], ...]  # of each piece: ends of S and T tokens, attention (T, S)

    def shares(self, begin: int, end: int, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Numbers:
        """Returns how much of parts of the translation, from `begins` to `ends`, comes from a span of the source."""
        places, masses = [np.zeros(1)], [np.zeros(1)]
        first = [0.0, 0.0]  # where the piece before ends, on both sides
        for sources, targets, weights in self.parts:
            starts = np.concatenate([first[:1], sources[:-1]])
            covered = np.clip(np.minimum(sources, end) - np.maximum(starts, begin), 0, None) / (sources - starts)
            masses.append(weights @ covered * np.diff(targets, prepend=first[1]))
            places.append(targets)
            first = [sources[-1], targets[-1]]
        mass, known = np.cumsum(np.concatenate(masses)), np.concatenate(places)
        shares: Numbers = (np.interp(ends, known, mass) - np.interp(begins, known, mass)) / np.maximum(ends - begins, 1)
        return shares


def linked(tokenizer: "PreTrainedTokenizerBase", source: str, translation: Translation) -> Linked:
    """Links a translation with its source by the model's attention; without it, both are taken to have one order."""
    sizes = size, number = solid_size(source), solid_size(translation.text)
    if (one := translation.alignment) is not None:
        sources, is_source = _ends(tokenizer, one.source_ids, size, use_source_tokenizer=True)
        targets, is_target = _ends(tokenizer, one.target_ids, number)
        if len(sources) and len(targets):  # unknown tokens spell nothing
            weights: Any = one.weights
            weights = (weights if isinstance(weights, np.ndarray) else weights.cpu().numpy()).astype(float)
            weights = weights[is_target][:, is_source]
            weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-9)  # without what goes to special tokens
            return Linked(translation.text, sizes, ((sources, targets, weights),))
    slices = min(MOST_SLICES, size, number)
    sources, targets = (np.linspace(0, side, slices + 1)[1:] for side in sizes)
    return Linked(translation.text, sizes, ((sources, targets, np.eye(slices)),) if slices else ())


def _ends(
    tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int], size: int, **options: bool
) -> tuple[Numbers, NDArray[np.bool_]]:
    """Returns where tokens end, and which they are: special ones spell nothing."""
    texts = (tokenizer.decode(list(ids[: end + 1]), skip_special_tokens=True, **options) for end in range(len(ids)))
    ends = np.maximum.accumulate([0, *map(solid_size, texts)])  # a part of a character may look like one
    is_spelled = np.diff(ends) > 0
    return ends[1:][is_spelled] * (size / max(ends[-1], 1)), is_spelled  # a tokenizer may spell a text otherwise


def join_linked(pieces: Iterable[Piece], translations: Sequence[Linked]) -> Linked:
    """Joins the translations of a text's pieces."""
    parts, size, number = list[tuple[Numbers, Numbers, Numbers]](), 0, 0
    for one in translations:
        parts += [(size + sources, number + targets, weights) for sources, targets, weights in one.parts]
        size, number = size + one.sizes[0], number + one.sizes[1]
    text = join_segments([(piece.gap, one.text) for piece, one in zip(pieces, translations, strict=True)])
    return Linked(text, (size, number), tuple(parts))


def translate_linked(
    translator: Translator, texts: Sequence[str], split_sentences: str, **options: Any
) -> list[Linked]:
    """Translates texts sentence by sentence, by the rules of a language, and links them with their translations."""
    check_splitting(split_sentences)
    limit = source_limit(translator.decodes_with, options.get("max_source_tokens"), translator.tokenizer)
    divided = [pieces_of(translator.tokenizer, text, limit, split_sentences) for text in texts]
    rows = iter(linked_rows(translator, [piece.text for pieces in divided for piece in pieces], **options))
    return [join_linked(pieces, [next(rows)[0] for _ in pieces]) for pieces in divided]


def linked_rows(
    translator: Translator, texts: list[str], *, alignments: bool = True, **options: Any
) -> list[list[Linked]]:
    """Links texts with their translations, one of each or `n_best`; by `alignments`, if the model shows attention."""
    if alignments:
        with suppress(ValueError):  # no attention; any other error comes again
            translator.check(**{**options, "alignments": True})
            options["alignments"] = True
    rows = translator(texts, **options)
    listed = (row if isinstance(row, list) else [Translation(row, 0) if isinstance(row, str) else row] for row in rows)
    if not alignments:
        return [[Linked(one.text, (0, 0), ()) for one in row] for row in listed]
    return [[linked(translator.tokenizer, text, one) for one in row] for text, row in zip(texts, listed, strict=True)]
