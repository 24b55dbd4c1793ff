"""What all documents have in common; which characters of a text each part of its translation comes from, by attention.

White space isn't counted: a tokenizer, a browser and a joined text may each have other white space.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..translation.backend import Translation
from ..translation.division import check_splitting, join_segments
from ..translation.reading import Piece, pieces_of
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
    parts: tuple[tuple[Numbers, Numbers, Numbers], ...] = ()  # of each piece: ends of S and T tokens, attention (T, S)

    def shares(self, begin: int, end: int, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Numbers:
        """Returns how much of parts of the translation, from `begins` to `ends`, comes from a span of the source."""
        places, masses = [np.zeros(1)], [np.zeros(1)]
        source = 0.0  # where the piece before ends
        for ends_of_source, ends_of_target, weights in self.parts:
            stops = source + ends_of_source
            starts = np.concatenate([[source], stops[:-1]])
            covered = np.clip(np.minimum(stops, end) - np.maximum(starts, begin), 0, None) / (stops - starts)
            masses.append(weights @ covered * np.diff(ends_of_target, prepend=0))
            places.append(places[-1][-1] + ends_of_target)
            source = stops[-1]
        mass, known = np.cumsum(np.concatenate(masses)), np.concatenate(places)
        return (np.interp(ends, known, mass) - np.interp(begins, known, mass)) / np.maximum(ends - begins, 1)


class Document:
    """A file, a part of one, or a text of a request: it gives its texts, and takes their translations."""

    is_prose = True  # texts are paragraphs of several sentences; otherwise each is translated as one
    is_linked = True  # `translated` asks which words come from which
    language: str | None = None  # that the document says it is in

    def __init__(self) -> None:
        self.places = defaultdict[str, list[int]](list)  # text -> the lines that it begins in, from 1
        self.problems: list[tuple[int, str]] = []  # lines that can't be translated, and why

    @property
    def texts(self) -> list[str]:
        """What is translated, each once."""
        return list(self.places)

    def translated(self, translations: Mapping[str, Linked]) -> str:
        """Returns the document in the target language; what has no translation is left out, or stays as it is."""
        raise NotImplementedError


def linked(tokenizer: "PreTrainedTokenizerBase", source: str, translation: Translation) -> Linked:
    """Links a translation with its source by the model's attention; without it, both are taken to have one order."""
    size, number = solid_size(source), solid_size(translation.text)
    if (one := translation.alignment) is not None:
        sources, is_source = _ends(tokenizer, one.source_ids, size, use_source_tokenizer=True)
        targets, is_target = _ends(tokenizer, one.target_ids, number)
        if len(sources) and len(targets):  # unknown tokens spell nothing
            weights = one.weights if isinstance(one.weights, np.ndarray) else one.weights.cpu().numpy()
            weights = weights.astype(float)[is_target][:, is_source]
            weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-9)  # without what goes to special tokens
            return Linked(translation.text, ((sources, targets, weights),))
    slices = max(min(MOST_SLICES, size, number), 1)
    sources, targets = (np.linspace(0, side, slices + 1)[1:] for side in (size, number))
    return Linked(translation.text, ((sources, targets, np.eye(slices)),))


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
    text = join_segments([(piece.gap, one.text) for piece, one in zip(pieces, translations, strict=True)])
    return Linked(text, tuple(part for one in translations for part in one.parts))


def translate_linked(
    translator: Translator, texts: Sequence[str], split_sentences: str, **options: Any
) -> list[Linked]:
    """Translates texts sentence by sentence, by the rules of a language, and links them with their translations."""
    check_splitting(split_sentences)
    limit = translator.source_limit(options.get("max_source_tokens"))
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
        return [[Linked(one.text) for one in row] for row in listed]
    return [[linked(translator.tokenizer, text, one) for one in row] for text, row in zip(texts, listed, strict=True)]
