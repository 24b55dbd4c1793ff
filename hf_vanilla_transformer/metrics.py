"""BLEU and chrF as sacreBLEU computes them, with the signatures that make scores comparable, and exact match."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF


@dataclass(frozen=True)
class Score:
    """A corpus score and how it was computed.

    Attributes:
        name: As sacreBLEU writes it, "BLEU" or "chrF2".
        value: From 0 to 100.
        signature: Settings and version, for instance "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0".
            Scores of different signatures can't be compared.
    """

    name: str
    value: float
    signature: str

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f} ({self.signature})"


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a", lowercase: bool = False
) -> Score:
    """BLEU of a corpus, one reference a sentence.

    Args:
        hypotheses: The translations, as plain text: sacreBLEU splits words by itself.
        references: The right translations, in the same order.
        tokenize: How sacreBLEU splits words: "13a" for most languages, "intl" for its Unicode-aware variant, "zh",
            "ja-mecab", "char", "none" for text that is split already ("none" isn't comparable with published scores).
        lowercase: Whether "The" and "the" count as the same word.
    """
    hypotheses, references = _checked(hypotheses, references)
    if tokenize not in BLEU.TOKENIZERS:
        raise ValueError(f"unknown tokenize={tokenize!r}; sacreBLEU has {', '.join(map(repr, BLEU.TOKENIZERS))}")
    return _score(BLEU(tokenize=tokenize, lowercase=lowercase), hypotheses, references)


def corpus_chrf(
    hypotheses: Sequence[str], references: Sequence[str], *, word_order: int = 0, lowercase: bool = False
) -> Score:
    """The F-score of character n-grams up to length 6 of a corpus, one reference a sentence.

    Args:
        hypotheses: The translations, as plain text.
        references: The right translations, in the same order.
        word_order: The longest word n-gram that counts as well: 0 is chrF, 2 is chrF++.
        lowercase: Whether "T" and "t" count as the same character.
    """
    hypotheses, references = _checked(hypotheses, references)
    if word_order < 0:
        raise ValueError(f"word_order is {word_order}; it must be 0 (chrF) or more (2: chrF++)")
    return _score(CHRF(word_order=word_order, lowercase=lowercase), hypotheses, references)


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Percentage (0 to 100) of hypotheses that equal their reference character by character."""
    hypotheses, references = _checked(hypotheses, references)
    equal = sum(hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True))
    return 100.0 * equal / len(references)


def _score(metric: BLEU | CHRF, hypotheses: list[str], references: list[str]) -> Score:
    result = metric.corpus_score(hypotheses, [references])
    return Score(name=result.name, value=result.score, signature=str(metric.get_signature()))


def _checked(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[list[str], list[str]]:
    hypotheses, references = _texts("hypotheses", hypotheses), _texts("references", references)
    if len(hypotheses) != len(references):
        raise ValueError(
            f"{len(hypotheses)} hypotheses but {len(references)} references; give each hypothesis its one reference"
        )
    if not references:
        raise ValueError("hypotheses and references are empty; a score needs at least one sentence")
    return hypotheses, references


def _texts(name: str, texts: Sequence[str]) -> list[str]:
    # A bare string is a sequence of strings, its characters: the types would let it pass. A set has no order.
    if isinstance(texts, str | bytes | Mapping | Set) or not isinstance(texts, Iterable):
        raise TypeError(f"{name} is a {type(texts).__name__}; give a list of strings, [text] for a single one")
    texts = list(texts)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{index}] is a {type(text).__name__}; every entry must be a string")
    return texts
