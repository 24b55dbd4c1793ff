"""Which model translates from which language into which."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..hub.facts import CardError, said_by_author
from ..translation.reading import encoder, target_code, target_codes
from ..translation.translator import Translator
from .batcher import Batch, Batcher


class LanguagesError(ValueError):
    """A model's languages aren't known, or two models have the same; the message says what to give."""


@dataclass(frozen=True)
class Route:
    """What translates from one language into another.

    Attributes:
        batcher: The model with its queue.
        target_lang: What the model is asked for, if it has several target languages.
    """

    batcher: Batcher
    target_lang: str | None = None


def pair(text: str) -> tuple[str, str]:
    """Parses a pair of languages, "en-de", or "pt_BR-en".

    Raises:
        LanguagesError: It is none.
    """
    source, dash, target = text.partition("-")
    if not (dash and source and target and "-" not in target and text.replace("_", "").replace("-", "").isalnum()):
        raise LanguagesError(f"{text!r} is no pair of languages; give source and target with one hyphen: en-de")
    return source, target


def languages_of(name: str) -> tuple[str, str]:
    """Returns the languages that a model's card names.

    Args:
        name: The model's folder.

    Raises:
        LanguagesError: The card doesn't say which is the source and which the target, or can't be read.
    """
    try:
        said = said_by_author(Path(name))
    except CardError as error:
        raise LanguagesError(str(error)) from error
    source, target = said.get("source_language"), said.get("target_language")
    if not (source and target):
        raise LanguagesError(f"{name} doesn't say what it translates; give --languages, such as en-de")
    return source, target


def routes(translator: Translator, pairs: Iterable[tuple[str, str]], batcher: Batcher) -> dict[tuple[str, str], Route]:
    """Returns the routes of one model.

    Args:
        translator: The model.
        pairs: Its languages.
        batcher: Its queue.

    Raises:
        LanguagesError: The model has several target languages, and one of the pairs' isn't among them.
    """
    found = {}
    for source, target in pairs:
        target_lang = target if target_codes(translator.tokenizer) else None
        if target_lang is not None:
            try:
                target_code(translator.tokenizer, target_lang)
            except ValueError as error:
                raise LanguagesError(f"{source}-{target}: {error}") from error
        found[source, target] = Route(batcher, target_lang)
    return found


def batcher_of(translator: Translator, on_batch: Callable[[Batch], object], **options: Any) -> Batcher:
    """Returns the queue of one model.

    Args:
        translator: The model.
        on_batch: Called after each batch.
        **options: For `Batcher`.
    """
    encode = encoder(translator.tokenizer)

    def count_tokens(texts: list[str]) -> list[int]:
        return [len(ids) for ids in encode(texts)]

    return Batcher(partial(_translate, translator), count_tokens, on_batch=on_batch, **options)


def _translate(
    translator: Translator, texts: Sequence[str], *, n_best: int, target_lang: str | None
) -> list[list[str]]:
    options = {} if target_lang is None else {"target_lang": target_lang}
    if n_best == 1:
        return [[text] for text in translator(list(texts), progress_bar=False, **options)]
    beams = max(n_best, getattr(translator.model.generation_config, "num_beams", None) or 1)
    rows = translator(list(texts), n_best=n_best, num_beams=beams, progress_bar=False, **options)
    return [[translation.text for translation in row] for row in rows]
