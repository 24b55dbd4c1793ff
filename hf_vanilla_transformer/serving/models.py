"""Models of the service, and the languages that they translate."""

import re
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path

from ..hub.facts import said_by_author
from ..translation.reading import encoder, target_code, target_codes
from ..translation.translator import Translator
from .batcher import Batcher


class LanguagesError(ValueError):
    """A model's languages aren't known, or it lacks one of them; the message says what to give."""


def pair(text: str) -> tuple[str, str]:
    """Parses a pair of languages, "en-de", or with a colon where a code has a hyphen, "en:pt-BR".

    Raises:
        LanguagesError: It is none.
    """
    code = r"[^\W-]+" if ":" not in text else r"[\w-]+"
    match = re.fullmatch(f"({code})[-:]({code})", text)
    if match is None:
        raise LanguagesError(f"{text!r} is no pair of languages; give source and target: en-de, or en:pt-BR")
    return match[1], match[2]


def languages_of(name: str) -> tuple[str, str]:
    """Returns the languages that the facts beside a model name, `model_card.json`.

    Args:
        name: The model's folder.

    Raises:
        LanguagesError: They don't say which is the source and which the target.
        CardError: They can't be read.
    """
    said = said_by_author(Path(name))
    source, target = said.get("source_language"), said.get("target_language")
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
    """Returns a model with its queue.

    Args:
        translator: The model.
        pairs: Languages that it is to translate.
        on_batch: As for `Batcher`.
        thread: Where the model was loaded.

    Raises:
        LanguagesError: The model has several target languages, and one of the pairs' isn't among them.
    """
    encode, has_targets = encoder(translator.tokenizer), bool(target_codes(translator.tokenizer))
    for source, target in pairs if has_targets else ():
        try:
            target_code(translator.tokenizer, target)
        except ValueError as error:
            raise LanguagesError(f"{source}-{target}: {error}") from error

    def translate(texts: list[str], n_best: int, target: str) -> list[list[str]]:
        target_lang = target if has_targets else None
        if n_best == 1:
            return [[text] for text in translator(texts, target_lang=target_lang, progress_bar=False)]
        beams = max(n_best, getattr(translator.model.generation_config, "num_beams", None) or 1)
        rows = translator(texts, n_best=n_best, num_beams=beams, target_lang=target_lang, progress_bar=False)
        return [[translation.text for translation in row] for row in rows]

    return Batcher(translate, lambda texts: [len(ids) for ids in encode(texts)], on_batch=on_batch, thread=thread)
