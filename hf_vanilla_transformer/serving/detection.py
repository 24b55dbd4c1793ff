"""Tells which of the service's languages a text is in, by py3langid."""

from collections.abc import Iterable, Sequence

from ..errors import install, named
from ..translation.division import base_language

LONG = 40  # letters; shorter texts of a list are in the language of the complete list, as with LibreTranslate

Guess = dict[str, str | float]  # "language", and "confidence" in per cent


class Detector:
    """Detects languages among those of the service; an ImportError, or a ValueError of a call, says why it can't."""

    def __init__(self, codes: Iterable[str]) -> None:
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ImportError as error:
            raise ImportError(f"detecting languages needs py3langid, which isn't here: {install('detect')}") from error
        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        self._codes: dict[str, str] = {}
        for code in codes:
            self._codes.setdefault(base_language(code), code)  # Brazilian Portuguese isn't told from Portuguese
        self._unknown = self._codes.keys() - set(self._identifier.labels)  # it would take them for others
        self._identifier.set_languages(self._codes.keys() - self._unknown)

    def rank(self, text: str) -> list[Guess]:
        """Returns the languages, the most probable first."""
        if self._unknown:
            raise ValueError(f"languages aren't detected here: py3langid doesn't know {named(self._unknown)}")
        if not any(map(str.isalpha, text)):
            raise ValueError("no language can be detected without letters; give the source's code, see /languages")
        ranked = self._identifier.rank(text)
        return [{"confidence": round(100 * one, 1), "language": self._codes[base]} for base, one in ranked]

    def each(self, texts: Sequence[str]) -> list[Guess]:
        """Returns the language of each text of a list."""
        of_all = self.rank("\n".join(texts))[0]
        return [self.rank(text)[0] if sum(map(str.isalpha, text)) > LONG else of_all for text in texts]
