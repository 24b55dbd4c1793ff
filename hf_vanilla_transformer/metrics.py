"""BLEU and chrF by sacreBLEU, BLEU as older papers computed it, and exact match.

Each score has a signature; only scores with equal signatures are comparable. `corpus_bleu` is the one to report today;
`compound_split_bleu` and `multi30k_bleu` are for comparisons with papers that used them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

# sacreBLEU's tokenisers that may precede the splitting of compounds.
COMPOUND_TOKENIZERS = ("13a", "intl", "none")
# For a bootstrap: resamples of one or two sentences hardly differ, so that any difference seems significant.
FEWEST_SENTENCES = 10


@dataclass(frozen=True)
class Score:
    """A corpus score and how it was computed.

    Attributes:
        name: As sacreBLEU writes it, "BLEU" or "chrF2".
        value: From 0 to 100.
        signature: Settings and version, for instance "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0".
            Scores with different signatures can't be compared.
        details: For BLEU, as sacreBLEU writes them: precisions of 1 to 4 words, brevity penalty, lengths in words and
            their ratio. A ratio far below 1 suggests another length penalty in decoding.
    """

    name: str
    value: float
    signature: str
    details: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.value:.2f} ({self.signature})"


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a", lowercase: bool = False
) -> Score:
    """BLEU of a corpus, with one reference per sentence.

    Args:
        hypotheses: The translations, N strings of plain text; sacreBLEU tokenises them.
        references: The reference translations, in the same order.
        tokenize: sacreBLEU's tokeniser: "13a" for most languages, "intl" for its Unicode-aware variant, "zh",
            "ja-mecab", "char", "none" for tokenised text ("none" isn't comparable with published scores).
        lowercase: Whether the score is case-insensitive.

    Returns:
        The score, from 0 to 100.

    Raises:
        ValueError: The numbers of hypotheses and references differ, there are none, or `tokenize` is unknown.
        TypeError: `hypotheses` or `references` is not a list of strings.
    """
    hypotheses, references = _checked(hypotheses, references)
    return _score(_sacrebleu(tokenize, lowercase), hypotheses, references)


def why_unmeasurable(alone: Score) -> str | None:
    """Returns why BLEU is 0 whatever the translations, if it is, by that of the references against themselves."""
    if alone.value > 99.9:
        return None
    return (
        f"BLEU stays 0: the references themselves have {alone}, as none has four words for this tokeniser; choose "
        "another (bleu_tokenize or --tokenize: zh, ja-mecab, char), or chrf instead of bleu"
    )


def compound_split_bleu(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a") -> Score:
    """BLEU with compounds split at hyphens, case-sensitive and not smoothed: the paper's for English-German (Table 2).

    The authors' script, tensor2tensor's get_ende_bleu.sh, splits hypotheses and references into words with Moses'
    tokenizer.perl, then "rich-text" into three (see `split_compounds`), and runs multi-bleu.perl. This function does
    the same after tokenising with one of sacreBLEU's tokenisers:

    - "none" is for text that Moses has tokenised (`tokenizer.perl -l de`, hypotheses after
      replace-unicode-punctuation.perl): the result is the script's own score, comparable with the paper's.
    - "13a" is for plain text and comes close: it doesn't separate non-ASCII quotation marks and dashes from their
      word, and unlike Moses it separates a hyphen after a digit.
    - "intl" is for plain text and separates every punctuation mark, hyphens between letters included, so that only
      hyphens between digits remain to be split.

    The score is usually higher than sacreBLEU's for the same text: compare it only with scores of the same signature.

    Args:
        hypotheses: The translations, N strings.
        references: The reference translations, in the same order.
        tokenize: "13a", "intl" or "none", as above.

    Returns:
        The score; its signature has "tok:13a+compound-split" (or "intl", "none") and "smooth:none".

    Raises:
        ValueError: The numbers of hypotheses and references differ, there are none, or `tokenize` is another one.
        TypeError: `hypotheses` or `references` is not a list of strings.
    """
    hypotheses, references = _checked(hypotheses, references)
    if tokenize not in COMPOUND_TOKENIZERS:
        raise ValueError(
            f"tokenize={tokenize!r} can't be combined with split compounds; give one of "
            f"{', '.join(map(repr, COMPOUND_TOKENIZERS))}"
        )
    words = BLEU(tokenize=tokenize).tokenizer
    hypotheses, references = (
        [split_compounds(words(text.rstrip())) for text in side] for side in (hypotheses, references)
    )
    score = _score(_multi_bleu(), hypotheses, references)
    signature = score.signature.replace("tok:none", f"tok:{tokenize}+compound-split")
    return replace(score, signature=signature)


def split_compounds(text: str) -> str:
    r"""Writes "rich-text" as "rich ##AT##-##AT## text", by perl's `s{(\S)-(\S)}{$1 ##AT##-##AT## $2}g`.

    A match consumes the bytes on both sides of the hyphen, so in "a-b-c" only the first hyphen is split. Perl works on
    bytes here, and so does this function: "ä" has two of them, so both hyphens of "a-ä-c" are split.
    """
    split = re.sub(rb"(\S)-(\S)", rb"\1 ##AT##-##AT## \2", text.encode(errors="surrogatepass"))
    return split.decode(errors="surrogatepass")


def multi30k_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """BLEU of lower-cased, tokenised text, as the literature on Multi30k reports it.

    It is the score of `multi-bleu.perl -lc`: words are separated by white space, without smoothing. It is comparable
    with published scores if both sides are tokenised as in the data set's own preparation (Moses' tokenizer.perl, no
    byte-pair encoding); on plain text it means little.

    Args:
        hypotheses: The translations, N strings of tokenised text.
        references: The reference translations, tokenised in the same way, in the same order.

    Returns:
        The score; its signature has "case:lc", "tok:none" and "smooth:none".

    Raises:
        ValueError: The numbers of hypotheses and references differ, or there are none.
        TypeError: `hypotheses` or `references` is not a list of strings.
    """
    hypotheses, references = _checked(hypotheses, references)
    return _score(_multi_bleu(lowercase=True), hypotheses, references)


def corpus_chrf(
    hypotheses: Sequence[str], references: Sequence[str], *, word_order: int = 0, lowercase: bool = False
) -> Score:
    """ChrF of a corpus: the F-score of character n-grams up to length 6, with one reference per sentence.

    Args:
        hypotheses: The translations, N strings of plain text.
        references: The reference translations, in the same order.
        word_order: The longest word n-gram that counts in addition: 0 is chrF, 2 is chrF++.
        lowercase: Whether the score is case-insensitive.

    Returns:
        The score, from 0 to 100.

    Raises:
        ValueError: The numbers of hypotheses and references differ, there are none, or `word_order` is negative.
        TypeError: `hypotheses` or `references` is not a list of strings.
    """
    hypotheses, references = _checked(hypotheses, references)
    if word_order < 0:
        raise ValueError(f"word_order is {word_order}; it must be 0 (chrF) or more (2: chrF++)")
    return _score(CHRF(word_order=word_order, lowercase=lowercase), hypotheses, references)


def exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """Returns the percentage (0 to 100) of hypotheses that are identical to their reference.

    Args:
        hypotheses: The translations, N strings.
        references: The reference translations, in the same order.

    Raises:
        ValueError: The numbers of hypotheses and references differ, or there are none.
        TypeError: `hypotheses` or `references` is not a list of strings.
    """
    hypotheses, references = _checked(hypotheses, references)
    equal = sum(hypothesis == reference for hypothesis, reference in zip(hypotheses, references, strict=True))
    return 100.0 * equal / len(references)


@dataclass(frozen=True)
class Comparison:
    """How a system's score compares with that of the first one.

    Attributes:
        name: The score's, "BLEU" or "chrF2".
        p_value: How often a difference as large as theirs appears by chance, from 0 to 1.
        signature: sacreBLEU's, with the number of resamples (`bs`) and the seed, SACREBLEU_SEED or 12345.
    """

    name: str
    p_value: float
    signature: str


def check_resampling(sentences: int) -> None:
    """Raises `ValueError` for too few sentences to be compared by `paired_bootstrap`."""
    if sentences < FEWEST_SENTENCES:
        raise ValueError(f"{sentences} sentences are too few to be resampled; give {FEWEST_SENTENCES} or more")


def paired_bootstrap(
    systems: Sequence[Sequence[str]],
    references: Sequence[str],
    *,
    kind: str = "sacrebleu",
    tokenize: str = "13a",
    lowercase: bool = False,
) -> list[list[Comparison]]:
    """Compares systems with the first one, by sacreBLEU's paired bootstrap resampling (Koehn 2004), 1,000 resamples.

    Args:
        systems: Two or more lists of N translations.
        references: N reference translations.
        kind: "sacrebleu" or "multi30k": which BLEU is compared, that of `corpus_bleu` or of `multi30k_bleu`.
        tokenize: As for `corpus_bleu`.
        lowercase: As for `corpus_bleu` and `corpus_chrf`.

    Returns:
        Of each system but the first, its BLEU's and its chrF's comparison.

    Raises:
        ValueError: There are fewer than two systems or 10 sentences, there is no such kind, or as for these functions.
        TypeError: As for these functions.
    """
    if len(systems) < 2 or kind not in ("sacrebleu", "multi30k"):
        raise ValueError(f"{len(systems)} systems can't be compared by {kind}; give two or more, sacrebleu or multi30k")
    check_resampling(len(references))
    bleu = _sacrebleu(tokenize, lowercase) if kind == "sacrebleu" else _multi_bleu(lowercase=True)
    named: Any = [(str(number), _checked(system, references)[0]) for number, system in enumerate(systems)]
    test = PairedTest(named, {"BLEU": bleu, "chrF": CHRF(lowercase=lowercase)}, [list(references)], test_type="bs")
    signatures, scores = test()
    columns = []
    for name, how in signatures.items():
        results: list[Any] = scores[name]
        first, *others = results
        # sacreBLEU counts only differences larger than the real one: equal scores would differ significantly.
        columns.append([Comparison(name, 1.0 if one.score == first.score else one.p_value, str(how)) for one in others])
    return [list(row) for row in zip(*columns, strict=True)]


def _sacrebleu(tokenize: str, lowercase: bool) -> BLEU:
    if tokenize not in BLEU.TOKENIZERS:
        raise ValueError(f"unknown tokenize={tokenize!r}; sacreBLEU has {', '.join(map(repr, BLEU.TOKENIZERS))}")
    # force: no warning about tokenised text; "none" is for that.
    return BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")


def _multi_bleu(lowercase: bool = False) -> BLEU:
    return BLEU(tokenize="none", smooth_method="none", lowercase=lowercase, force=True)


def _score(metric: BLEU | CHRF, hypotheses: list[str], references: list[str]) -> Score:
    result = metric.corpus_score(hypotheses, [references])
    details = "".join(result.format().split(" ", 3)[3:])  # behind "BLEU = 41.21"
    return Score(result.name, result.score, str(metric.get_signature()), details)


def _checked(hypotheses: Sequence[str], references: Sequence[str]) -> tuple[list[str], list[str]]:
    hypotheses, references = _texts("hypotheses", hypotheses), _texts("references", references)
    if len(hypotheses) != len(references):
        raise ValueError(
            f"{len(hypotheses)} hypotheses but {len(references)} references; give one reference per hypothesis"
        )
    if not references:
        raise ValueError("hypotheses and references are empty; a score needs at least one sentence")
    return hypotheses, references


def _texts(name: str, texts: Sequence[str]) -> list[str]:
    # A string is a sequence of strings too, so the type check alone would accept it. A set has no order.
    if isinstance(texts, str | bytes | Mapping | Set) or not isinstance(texts, Iterable):
        raise TypeError(f"{name} is a {type(texts).__name__}; give a list of strings, [text] for a single one")
    texts = list(texts)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{index}] is a {type(text).__name__}; every entry must be a string")
    return texts
