"""Tells which of the service's languages a text is in, by py3langid."""

from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import install, named
from ..translation.division import base_language

ROUNDS = 3  # more change next to nothing

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
        self._check(text)
        return [self._guess(base, share) for base, share in self._identifier.rank(text)]

    def _check(self, text: str) -> None:
        if self._unknown:
            raise ValueError(f"languages aren't detected here: py3langid doesn't know {named(self._unknown)}")
        if not any(map(str.isalpha, text)):
            raise ValueError("no language can be detected without letters; give the source's code, see /languages")

    def each(self, texts: Sequence[str]) -> list[Guess]:
        """Returns the language of each text of a list; where a text may be in several, the list's most frequent one."""
        self._check("\n".join(texts))
        bases = sorted(self._codes)
        ranked = (dict(self._identifier.rank(text)) for text in texts)
        own = np.array([[one[base] for base in bases] for one in ranked])
        shares = np.ones(len(bases))
        for _ in range(ROUNDS):  # of the EM algorithm for a mixture's shares
            likely = own * shares
            likely /= likely.sum(axis=1, keepdims=True)
            shares = likely.sum(axis=0)
        chosen = (own * shares).argmax(axis=1)
        return [self._guess(bases[place], one[place]) for one, place in zip(own, chosen, strict=True)]

    def _guess(self, base: str, share: float) -> Guess:
        return {"confidence": round(100 * float(share), 1), "language": self._codes[base]}
