"""What all documents have in common, the languages of their texts, and their translation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ..checkpoints.kinds import CONFIG
from ..data.formats import HTML, SUBTITLES
from ..errors import first_line
from ..translation.reading import UNDETERMINED, base_language, sentence_rules
from ..translation.translator import Translator
from .links import Linked, translate_linked


class Document(Protocol):
    """A file, a part of one, or a text of a request."""

    @property
    def texts(self) -> Sequence[str]:
        """What is translated, each once."""

    @property
    def places(self) -> Mapping[str, Sequence[int]]:
        """Text -> the lines that it begins in, from 1."""

    @property
    def problems(self) -> Sequence[tuple[int, str]]:
        """Lines that can't be translated, and why."""

    @property
    def is_prose(self) -> bool:
        """Whether texts are paragraphs of several sentences; otherwise each is translated as one."""

    @property
    def is_linked(self) -> bool:
        """Whether `translated` asks which words come from which."""

    @property
    def language(self) -> str | None:
        """The language that the document says it is in."""

    def translated(self, translations: Mapping[str, Linked]) -> str:
        """Returns the document in the target language; a text may lack a translation."""


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
    found, reasons = dict[str, Linked](), dict[str, str]()
    for text, outcome in _outcomes(_call(translator, document, language, options), list(document.texts)):
        if isinstance(outcome, Linked):
            found[text] = outcome
        else:
            reasons[text] = outcome
    refused = ((place, reason) for text, reason in reasons.items() for place in document.places[text])
    return Part(document.translated(found), sorted([*document.problems, *refused]))


def for_many(translator: Translator, options: Mapping[str, Any]) -> tuple[Callable[[Document], Part], str | None]:
    """Returns what translates one document after the other, and their target language; the card is read once."""
    source, target = languages(translator, options)
    return partial(translate_document, translator, language=source or UNDETERMINED, **options), target


def _call(
    translator: Translator, document: Document, language: str | None, options: dict[str, Any]
) -> Callable[[list[str]], list[Linked]]:
    if document.is_prose and options.get("split_sentences") is None:
        spoken = document.language or language or languages(translator, options)[0]
        options = {**options, "split_sentences": sentence_rules(spoken)}
    if document.is_linked:
        return partial(translate_linked, translator, **options)
    return lambda texts: [Linked(text, (0, 0), ()) for text in translator(texts, **options)]


def _outcomes(translate: Callable[[list[str]], list[Linked]], texts: list[str]) -> Iterator[tuple[str, Linked | str]]:
    """Yields texts with their translations or, found by halves, the reasons why there is none."""
    try:
        yield from zip(texts, translate(texts), strict=True)  # of none, too: that checks the options
        return
    except (ValueError, IndexError) as error:
        if not texts:
            raise
        if len(texts) == 1:
            yield texts[0], first_line(error)
            return
    half = len(texts) // 2
    yield from _outcomes(translate, texts[:half])
    yield from _outcomes(translate, texts[half:])


def languages(translator: Translator, options: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Returns source and target language: those of the options, the translator or the model's card; None: unknown."""
    from ..hub.card_file import CardError
    from ..hub.facts import said_by_author

    said, folder = dict[str, Any](), folder_of(getattr(translator.model, "name_or_path", ""))
    with suppress(CardError):
        said = {} if folder is None else said_by_author(folder)
    given = {**translator.languages, **{name: value for name, value in options.items() if value is not None}}
    target = given["tgt_lang"] or said.get("target_language")
    return given["src_lang"] or said.get("source_language"), target and base_language(target)


def folder_of(model: str) -> Path | None:
    """Returns the folder of a model, given as such or by its name on the Hub; None: it isn't in the cache."""
    if not model or Path(model).is_dir():
        return Path(model) if model else None
    from huggingface_hub import try_to_load_from_cache  # slow, and an exported folder does without

    found = None
    with suppress(ValueError):  # a folder that is gone
        found = try_to_load_from_cache(model, CONFIG)
    return Path(found).parent if isinstance(found, str) else None
