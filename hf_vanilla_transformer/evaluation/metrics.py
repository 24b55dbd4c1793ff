"""BLEU and chrF as sacreBLEU computes them, BLEU in the ways of older papers, and exact match.

Scores carry the signatures that make them comparable. `corpus_bleu` is what to report today; `compound_split_bleu` and
`multi30k_bleu` are for a comparison with figures that were obtained so.
"""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from sacrebleu.metrics.bleu import BLEU, BLEUScore
from sacrebleu.metrics.chrf import CHRF, CHRFScore

# How text may be split into words before its compounds are split.
COMPOUND_TOKENIZERS = ("13a", "intl", "none")


@dataclass(frozen=True)
class Score:
    """A corpus score and how it was computed.

    Attributes:
        name: As sacreBLEU writes it, "BLEU" or "chrF2".
        value: From 0 to 100.
        signature: Settings and version, for instance "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0".
            Scores of different signatures can't be compared.
        details: Of BLEU, as sacreBLEU writes them: precisions of 1 to 4 words, brevity penalty, lengths in words and
            their ratio. A ratio far below 1 asks for another length penalty in decoding.
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
    # force: text that is split already is what "none" is for, so sacreBLEU needn't warn of it.
    return _score(BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none"), hypotheses, references)


def compound_split_bleu(hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "13a") -> Score:
    """BLEU with compounds split at their hyphens, cased and not smoothed: the paper's of English-German (Table 2).

    The authors' script, tensor2tensor's get_ende_bleu.sh, splits hypotheses and references into words with Moses'
    tokenizer.perl, then "rich-text" into three (see `split_compounds`), and runs multi-bleu.perl. This function does
    the same after splitting words with one of sacreBLEU's tokenizers:

    - "none" takes text that was split by Moses (`tokenizer.perl -l de`, hypotheses after
      replace-unicode-punctuation.perl): that is the script's own figure, comparable with the paper's.
    - "13a" takes plain text and comes near: it leaves quotation marks and dashes outside of ASCII joined to their
      word, and parts a hyphen behind a digit by itself, where Moses doesn't.
    - "intl" takes plain text and parts every punctuation mark, hyphens between letters included, so that the rule
      finds only those between digits.

    The figure is usually higher than sacreBLEU's for the same text: compare it with others of its signature alone.

    Args:
        hypotheses: The translations.
        references: The right translations, in the same order.
        tokenize: "13a", "intl" or "none", as above.

    Returns:
        The score; its signature has "tok:13a+compound-split" (or "intl", "none") and "smooth:none".

    Raises:
        ValueError: The two aren't equally many, there is none, or another `tokenize`.
        TypeError: They are no lists of strings.
    """
    hypotheses, references = _checked(hypotheses, references)
    if tokenize not in COMPOUND_TOKENIZERS:
        raise ValueError(
            f"tokenize={tokenize!r} does not go with split compounds; give one of "
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

    A match takes the two bytes beside the hyphen, so that the middle of "a-b-c" serves the first hyphen alone and
    "b-c" stays. Perl sees bytes here, as does this function: "ä" is two of them and serves both hyphens.
    """
    split = re.sub(rb"(\S)-(\S)", rb"\1 ##AT##-##AT## \2", text.encode(errors="surrogatepass"))
    return split.decode(errors="surrogatepass")


def multi30k_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> Score:
    """BLEU of lower-cased text that is split into words already, as the literature on Multi30k reports it.

    It is what `multi-bleu.perl -lc` computes: words are what white space parts, and nothing is smoothed. Comparable
    with published figures where both sides are tokenised as the data set's own preparation does it (Moses'
    tokenizer.perl, no byte-pair pieces); on plain text the figure means little.

    Args:
        hypotheses: The translations, tokenised.
        references: The right translations, tokenised alike, in the same order.

    Returns:
        The score; its signature has "case:lc", "tok:none" and "smooth:none".

    Raises:
        ValueError: The two aren't equally many, or there is none.
        TypeError: They are no lists of strings.
    """
    hypotheses, references = _checked(hypotheses, references)
    return _score(_multi_bleu(lowercase=True), hypotheses, references)


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


def _multi_bleu(lowercase: bool = False) -> BLEU:
    return BLEU(tokenize="none", smooth_method="none", lowercase=lowercase, force=True)


def _score(metric: BLEU | CHRF, hypotheses: list[str], references: list[str]) -> Score:
    result = metric.corpus_score(hypotheses, [references])
    return Score(result.name, result.score, str(metric.get_signature()), _details(result))


def _details(result: BLEUScore | CHRFScore) -> str:
    if not isinstance(result, BLEUScore):
        return ""
    precisions, lengths = "/".join(f"{p:.1f}" for p in result.precisions), (result.sys_len, result.ref_len)
    figures = f"BP = {result.bp:.3f} ratio = {result.ratio:.3f} hyp_len = {lengths[0]} ref_len = {lengths[1]}"
    return f"{precisions} ({figures})"


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
