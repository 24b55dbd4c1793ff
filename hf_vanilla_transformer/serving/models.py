"""Models of the service, and the languages that they translate."""

import re
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

from ..documents.document import languages as spoken
from ..documents.document import said_languages
from ..documents.links import Linked, linked_rows
from ..translation.division import base_language, sentence_rules
from ..translation.languages import known_languages, target_codes
from ..translation.reading import Piece, pieces_of
from ..translation.translator import Translator
from .batcher import Batcher


class LanguagesError(ValueError):
    """A model's languages aren't known, or it lacks one of them; the message says what to give."""


def pair(text: str) -> tuple[str, str]:
    """Parses a pair of languages, "en-de", or with a colon where a code has a hyphen, "en:pt-BR"."""
    code = r"[^\W-]+" if ":" not in text else r"[\w-]+"
    match = re.fullmatch(f"({code})[-:]({code})", text)
    if match is None:
        raise LanguagesError(f"{text!r} is no pair of languages; give source and target: en-de, or en:pt-BR")
    return match[1], match[2]


def languages_of(name: str) -> tuple[str, str]:
    """Returns what a model says that it translates; `LanguagesError`: nothing; `CardError`: its card can't be read."""
    source, target = said_languages(name)
    if not (source and target):
        raise LanguagesError(f"{name} doesn't say what it translates; give --languages, such as en-de")
    return source, target


def batcher_of(
    translator: Translator,
    pairs: Iterable[tuple[str, str]],
    on_batch: Callable[[int, int], object] = lambda texts, tokens: None,
    *,
    thread: Executor,
) -> Batcher:
    """Returns a model with its queue; the thread is the one that loaded it.

    A pair that the model doesn't translate, by its languages or its card, raises `LanguagesError`.
    """
    tokenizer = translator.tokenizer
    limit = translator.source_limit()
    has_languages = bool(known_languages(tokenizer) or translator.decodes_with.tasks)

    def languages(source: str, target: str) -> dict[str, object]:
        if has_languages:
            return {"src_lang": source, "tgt_lang": target}
        return {"tgt_lang": target} if target_codes(tokenizer) else {}

    said = spoken(translator, {})
    for source, target in pairs:
        if not has_languages and (base_language(target), base_language(source)) == said:
            raise LanguagesError(f"{source}-{target}: the model says that it translates {'-'.join(said)}")
        try:
            translator.check(**languages(source, target))
        except ValueError as error:
            raise LanguagesError(f"{source}-{target}: {error}") from error

    def translate(texts: list[str], n_best: int, source: str, target: str, linked: bool) -> list[list[Linked]]:
        options = languages(source, target)
        if n_best > 1:
            options |= {"n_best": n_best, "num_beams": max(n_best, translator.plan(**options).num_beams)}
        return linked_rows(translator, texts, alignments=linked, progress_bar=False, **options)

    def divide(text: str, source: str) -> list[Piece]:
        return pieces_of(tokenizer, text, limit, sentence_rules(source))

    return Batcher(translate, divide, on_batch=on_batch, thread=thread)
