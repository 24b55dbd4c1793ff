"""Translations that are linked with their sources."""

from collections.abc import Iterable

import numpy as np

from hf_vanilla_transformer.documents.links import Document, Linked


def size(text: str) -> int:
    return len("".join(text.split()))


def link(text: str, origins: Iterable[int], number: int) -> Linked:
    """Links each character of a text with the number of one in the source, or with none (-1)."""
    rows = np.array(list(origins))[:, None] == np.arange(number)
    ends = np.arange(1.0, number + 1), np.arange(1.0, len(rows) + 1)
    return Linked(text, ((*ends, rows.astype(float)),))


def shouted(document: Document) -> str:
    """Translates each character into a capital at its place."""
    return document.translated({text: link(text.upper(), range(size(text)), size(text)) for text in document.texts})
