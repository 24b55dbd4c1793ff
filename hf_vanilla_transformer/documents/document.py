"""Opening documents, the languages of their texts, and their translation."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..data.formats import HTML, SUBTITLES
from ..errors import first_line
from ..hub.facts import CardError, said_by_author
from ..translation.ctranslate2_folder import pair_of
from ..translation.division import base_language, sentence_rules
from ..translation.translator import Translator
from .links import Document, Linked, translate_linked


class Part(NamedTuple):
    """A document in the target language, and the lines that aren't translated with the reasons."""

    data: str
    errors: list[tuple[int, str]]


def open_document(source: str, form: str, target: str | None = None) -> Document:
    """Returns the document that a text is; raises `CorpusError` if it has another form.

    The form is a suffix of a file's name, ".html", ".srt" ...; "" is plain text, whose lines are translated one by one.
    `target` is the language that HTML is to say it is in.
    """
    if form in HTML:
        from .markup import Html

        return Html(source, target)
    if form in SUBTITLES:
        from .subtitles import Subtitles

        return Subtitles(source, form)
    from .rows import plain_text

    return plain_text(source)


def translate_document(translator: Translator, document: Document, language: str | None = None, **options: Any) -> Part:
    """Translates a document; where a text is refused, it alone is left out. Options are for the translator.

    Without `split_sentences`, paragraphs are divided by the rules of the language that the document names, else of
    `language`, None: of `src_lang`, else of the model's, else by rules for all languages.
    """
    if document.is_prose and options.get("split_sentences") is None:
        spoken = document.language or language or languages(translator, options)[0]
        options["split_sentences"] = sentence_rules(spoken)
    translate = partial(translate_linked if document.is_linked else _translate, translator, **options)
    outcomes = dict(zip(document.texts, _outcomes(translate, document.texts), strict=True))
    found = {text: outcome for text, outcome in outcomes.items() if isinstance(outcome, Linked)}
    reasons = ((text, outcome) for text, outcome in outcomes.items() if isinstance(outcome, str))
    refused = ((place, reason) for text, reason in reasons for place in document.places[text])
    return Part(document.translated(found), sorted([*document.problems, *refused]))


def _translate(translator: Translator, texts: list[str], **options: object) -> list[Linked]:
    return [Linked(text) for text in translator(texts, **options)]


def _outcomes(translate: Callable[[list[str]], list[Linked]], texts: list[str]) -> list[Linked | str]:
    """Returns translations or, found by halves, the reasons why there is none."""
    try:
        return [*translate(texts)]  # of none, too: that checks the options
    except (ValueError, IndexError) as error:
        if not texts:
            raise
        if len(texts) == 1:
            return [first_line(error)]
    half = len(texts) // 2
    return [*_outcomes(translate, texts[:half]), *_outcomes(translate, texts[half:])]


def languages(translator: Translator, options: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Returns source and target language: those of the options, the translator or the model; None: unknown."""
    given = {**translator.languages, **{name: value for name, value in options.items() if value is not None}}
    said: tuple[str | None, str | None] = None, None
    with suppress(CardError):
        said = said_languages(getattr(translator.model, "name_or_path", ""))
    source, target = given["src_lang"] or said[0], given["tgt_lang"] or said[1]
    return source and base_language(source), target and base_language(target)


def said_languages(name: str) -> tuple[str | None, str | None]:
    """Returns the source and target language of an Argos package, or those of a model's card; None: unknown."""
    if not name:
        return None, None
    if known := pair_of(name):
        return known
    folder: Path | None = Path(name)
    if not Path(name).is_dir():
        from ..data.hub_names import cached_folder  # slow, and an exported folder does without

        folder = cached_folder(name)
    said = said_by_author(folder) if folder else {}
    return said.get("source_language"), said.get("target_language")
