"""BLEU and chrF by sacreBLEU, BLEU as older papers computed it, exact match, and errors of symbols and characters.

Each score has a signature; only scores with equal signatures are comparable. "bleu" is the one to report today;
"bleu_compound_split" and "bleu_multi30k" are for comparisons with papers that used them.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rapidfuzz.distance import Levenshtein
from sacrebleu.metrics.base import Metric, Signature
from sacrebleu.metrics.base import Score as SacreScore
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest

# sacreBLEU's tokenisers that may precede the splitting of compounds.
COMPOUND_TOKENIZERS = ("13a", "intl", "none")
# For a bootstrap: resamples of one or two sentences hardly differ, so that any difference seems significant.
FEWEST_SENTENCES = 10
# The measures by their names in options -> whether more is better.
MEASURES = {
    **dict.fromkeys(("bleu", "bleu_multi30k", "bleu_compound_split", "chrf", "exact_match"), True),
    **dict.fromkeys(("wer", "ser", "cer"), False),
}

References = Sequence[str] | Sequence[Sequence[str]]  # one per hypothesis, or one or several
Splitter = Callable[[str], Sequence[Hashable]]  # text -> its symbols
Edits = list[tuple[Hashable, Hashable]]  # symbols expected and predicted; an insertion expects None, a deletion has it
Streams = list[list[Any]]  # references as sacreBLEU has them: all first ones, all second ones, with None for none
Named = list[tuple[str, Sequence[str]]]  # systems with their names
Units = dict[str, list[Sequence[Hashable]]]  # "references" -> the units of each


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
    hypotheses: Sequence[str], references: References, *, tokenize: str = "13a", lowercase: bool = False
) -> Score:
    """BLEU of a corpus, from 0 to 100, with one reference per sentence, or several.

    Args:
        hypotheses: The translations, N strings of plain text; sacreBLEU tokenises them.
        references: In the same order: a string, or a list of strings for each.
        tokenize: sacreBLEU's tokeniser: "13a" for most languages, "intl" for its Unicode-aware variant, "zh",
            "ja-mecab", "char", "none" for tokenised text ("none" isn't comparable with published scores).
        lowercase: Whether the score is case-insensitive.

    Raises:
        ValueError: The numbers of hypotheses and references differ, there are none, or `tokenize` is unknown.
        TypeError: `hypotheses` or `references` is not a list of strings.
    """
    return measure(["bleu"], hypotheses, references, tokenize=tokenize, lowercase=lowercase)["bleu"]


def why_unmeasurable(alone: Score) -> str | None:
    """Returns why BLEU is 0 whatever the translations, if it is, by that of the references against themselves."""
    if alone.value > 99.9:
        return None
    return (
        f"BLEU stays 0: the references themselves have {alone}, as none has four words for this tokeniser; choose "
        "another (bleu_tokenize or --tokenize: zh, ja-mecab, char), or chrf instead of bleu"
    )


def split_compounds(text: str) -> str:
    r"""Writes "rich-text" as "rich ##AT##-##AT## text", by perl's `s{(\S)-(\S)}{$1 ##AT##-##AT## $2}g`.

    A match consumes the bytes on both sides of the hyphen, so in "a-b-c" only the first hyphen is split. Perl works on
    bytes here, and so does this function: "ä" has two of them, so both hyphens of "a-ä-c" are split.
    """
    split = re.sub(rb"(\S)-(\S)", rb"\1 ##AT##-##AT## \2", text.encode(errors="surrogatepass"))
    return split.decode(errors="surrogatepass")


def measure(
    names: Iterable[str],
    hypotheses: Sequence[str],
    references: References,
    *,
    sources: Sequence[Hashable] | None = None,
    tokenize: str = "13a",
    lowercase: bool = False,
    symbols: Splitter | None = None,
    unknown: str | None = None,
) -> dict[str, Score]:
    """Measures hypotheses; all values are from 0 up, and percentages.

    - "bleu": sacreBLEU's (`corpus_bleu`).
    - "bleu_multi30k": of lower-cased, tokenised text, as the literature on Multi30k reports it: `multi-bleu.perl -lc`,
      with words separated by white space, without smoothing. It is comparable with published scores if both sides are
      tokenised as in the data set's own preparation (Moses' tokenizer.perl, no byte-pair encoding); on plain text it
      means little.
    - "bleu_compound_split": with compounds split at hyphens, case-sensitive and not smoothed: the paper's for
      English-German (Table 2). The authors' script, tensor2tensor's get_ende_bleu.sh, splits both sides into words with
      Moses' tokenizer.perl, then "rich-text" into three (`split_compounds`), and runs multi-bleu.perl; this does the
      same after one of sacreBLEU's tokenisers, and is usually higher than "bleu" for the same text. "none" is for text
      that Moses has tokenised (`tokenizer.perl -l de`, hypotheses after replace-unicode-punctuation.perl): the result
      is the script's own. "13a" is for plain text and comes close: it doesn't separate non-ASCII quotation marks and
      dashes from their word, and unlike Moses it separates a hyphen after a digit. "intl" separates every punctuation
      mark of plain text, hyphens between letters included, so that only hyphens between digits remain to be split.
    - "chrf": sacreBLEU's F-score of character n-grams up to length 6.
    - "exact_match": hypotheses that are a reference, symbol by symbol.
    - "wer": the others, as pronunciation and inflection report it (not the error rate of speech recognition).
    - "ser": errors per symbol of the references: edits (insertions, deletions, substitutions; Levenshtein), summed
      over the corpus.
    - "cer": errors per character (code point, spaces too; `unknown` is one), likewise.

    Of several references, the one with the fewest errors counts, of these the longest. Errors are those of
    `corpus_bleu`, and a `ValueError` for another measure.

    Args:
        names: Of these, in the order of the result.
        hypotheses: N strings.
        references: One reference for each, or a list of them; among several, an empty one is none.
        sources: N sources; of those that are equal, the first one's hypothesis counts, with the references of all.
        tokenize: Of "bleu", as for `corpus_bleu`, and "bleu_compound_split": "13a", "intl" or "none".
        lowercase: Of "bleu" and "chrf".
        symbols: Divides a text into symbols, as `data.symbols.symbol_splitter` has it for a tokenizer; None: texts are
            compared as they are, and the symbols of "ser" are what white space separates.
        unknown: How hypotheses show a symbol that the model doesn't know, such as "<unk>". To BLEU and chrF it is text
            like any other, so that the command `sacrebleu` prints the same of the written translations.
    """
    if sources is not None:
        if len(sources) != len(hypotheses):
            raise ValueError(f"{len(sources)} sources for {len(hypotheses)} hypotheses; give one for each")
        places, references = by_source(sources, references)
        hypotheses = [hypotheses[place] for place in places]
    hypotheses, streams = _checked(hypotheses, references)
    metrics = {name: _metric(name, tokenize, lowercase, symbols, unknown) for name in names}
    return {name: _score(metric, hypotheses, streams) for name, metric in metrics.items()}


def top_accuracy(
    n_best: Sequence[Sequence[str]], references: References, count: int, *, symbols: Splitter | None = None
) -> Score:
    """The percentage of N n-best lists that have a reference among their first `count` (1 or more) hypotheses.

    References, symbols and errors are as for `measure`.
    """
    _, streams = _checked([""] * len(n_best), references)
    same = symbols or str
    columns = zip_longest(*(row[:count] for row in n_best))
    found = [False] * len(n_best)
    for column in columns:
        for place, (text, *own) in enumerate(zip(column, *streams, strict=True)):
            found[place] |= any(None not in (text, one) and same(text) == same(one) for one in own)
    signature = str(Signature({"num_refs": len(streams)}))
    return Score(f"top {count}", 100.0 * sum(found) / len(found), signature)


def nearest(n_best: Sequence[Sequence[str]], references: Sequence[str], measure: str = "bleu") -> list[str]:
    """Returns of each n-best list the hypothesis nearest to its one reference; of equally near ones the first.

    By sacreBLEU's sentence BLEU, which smooths and counts only lengths of n-grams that there are, or "chrf".
    """
    metric = {"bleu": BLEU(effective_order=True), "chrf": CHRF()}[measure]
    return [
        max(row, key=lambda text: metric.sentence_score(text, [reference]).score)
        for row, reference in zip(n_best, references, strict=True)
    ]


def by_source(sources: Sequence[Hashable], references: References) -> tuple[list[int], list[list[str]]]:
    """Groups pairs by their source: the places of the first pair of each, and all references of each, once."""
    if len(sources) != len(references):
        raise ValueError(f"{len(sources)} sources and {len(references)} references; give one or more for each")
    rows = [[own] if isinstance(own, str) else own for own in references]
    groups: dict[Hashable, list[int]] = {}
    for place, source in enumerate(sources):
        groups.setdefault(source, []).append(place)
    return [own[0] for own in groups.values()], [
        list(dict.fromkeys(one for place in own for one in rows[place])) for own in groups.values()
    ]


class _UnitSignature(Signature):
    def __init__(self, args: dict[str, object]) -> None:
        super().__init__(args)
        self.update("unit", args["unit"])


class _Errors(Metric):
    """A sacreBLEU metric, so that it has signatures and resampling: errors per 100 units of the references."""

    _SIGNATURE_TYPE = _UnitSignature

    def __init__(self, name: str, unit: str, split: Splitter | None, counts_right: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.unit, self._split, self._counts_right = name, unit, split, counts_right

    def _preprocess_segment(self, sent: str) -> str:
        return sent

    def _extract_reference_info(self, refs: Sequence[str]) -> Units:
        return {"references": [self._units(text) for text in refs]}

    def _compute_segment_statistics(self, hypothesis: str, ref_kwargs: Units) -> list[int]:
        own = self._units(hypothesis)
        errors, length = min(_distance(own, one) for one in ref_kwargs["references"])
        return [errors, -length]

    def _units(self, text: str) -> Sequence[Hashable]:
        return [text] if self._split is None else self._split(text)

    def _compute_score_from_stats(self, stats: Sequence[int]) -> SacreScore:
        errors, total = stats
        rate = 100.0 * float(errors) / max(float(total), 1.0)
        return SacreScore(self.name, 100.0 - rate if self._counts_right else rate)

    def _aggregate_and_compute(self, stats: list[list[int]]) -> SacreScore:
        return self._compute_score_from_stats([sum(column) for column in zip(*stats, strict=True)])


def _distance(own: Sequence[Hashable], reference: Sequence[Hashable]) -> tuple[int, int]:
    """What the nearest reference has the least of: edits, and of those with as many, it is the longest."""
    return Levenshtein.distance(own, reference), -len(reference)


def edits(hypothesis: str, references: Sequence[str], symbols: Splitter | None = None) -> tuple[str, Edits]:
    """Returns the nearest reference, and the edits that "ser" counts; references and symbols are as for `measure`."""
    split = symbols or str.split
    own = split(hypothesis)
    reference = min(references, key=lambda one: _distance(own, split(one)))
    wanted = split(reference)
    return reference, [
        (None if one.tag == "insert" else wanted[one.src_pos], None if one.tag == "delete" else own[one.dest_pos])
        for one in Levenshtein.editops(wanted, own)
    ]


def _metric(name: str, tokenize: str, lowercase: bool, symbols: Splitter | None, unknown: str | None) -> Metric:
    whole = (lambda text: [tuple(symbols(text))]) if symbols else None
    characters = (lambda text: list(text.replace(unknown, "\ufffc"))) if unknown else list
    made: dict[str, Callable[[], Metric]] = {
        "bleu": lambda: _sacrebleu(tokenize, lowercase),
        "bleu_multi30k": lambda: _multi_bleu(lowercase=True),
        "bleu_compound_split": lambda: _compound_split(tokenize),
        "chrf": lambda: CHRF(lowercase=lowercase),
        "exact_match": lambda: _Errors("exact match", "text", whole, counts_right=True),
        "wer": lambda: _Errors("WER", "text", whole),
        "ser": lambda: _Errors("SER", "symbol", symbols or str.split),
        "cer": lambda: _Errors("CER", "character", characters),
    }
    if name not in made:
        raise ValueError(f"there is no measure {name!r}; give some of {', '.join(MEASURES)}")
    return made[name]()


@dataclass(frozen=True)
class Comparison:
    """How a system's score compares with that of the first one."""

    name: str  # the measure's `title`, "BLEU", "bleu_multi30k" or "chrF2"
    p_value: float  # how often a difference as large as theirs appears by chance, from 0 to 1
    signature: str  # sacreBLEU's, with the number of resamples (`bs`) and the seed, SACREBLEU_SEED or 12345


def check_resampling(sentences: int) -> None:
    """Raises `ValueError` for too few sentences to be compared by `paired_bootstrap`."""
    if sentences < FEWEST_SENTENCES:
        raise ValueError(f"{sentences} sentences are too few to be resampled; give {FEWEST_SENTENCES} or more")


def paired_bootstrap(
    systems: Sequence[Sequence[str]],
    references: References,
    *,
    names: Sequence[str] = ("bleu", "chrf"),
    tokenize: str = "13a",
    lowercase: bool = False,
    symbols: Splitter | None = None,
    unknown: str | None = None,
) -> list[list[Comparison]]:
    """Compares systems with the first one, by sacreBLEU's paired bootstrap resampling (Koehn 2004), 1,000 resamples.

    `systems` are two or more lists of N translations, of at least 10 sentences; references, options and errors are as
    for `measure`. Returns, for each system but the first, the comparison of each measure in `names`.
    """
    if len(systems) < 2:
        raise ValueError(f"{len(systems)} systems can't be compared; give two or more")
    check_resampling(len(references))
    checked = [_checked(system, references) for system in systems]
    named: Named = [(str(number), hypotheses) for number, (hypotheses, _) in enumerate(checked)]
    metrics = {name: _metric(name, tokenize, lowercase, symbols, unknown) for name in names}
    columns = [_compared(name, metric, named, checked[0][1]) for name, metric in metrics.items()]
    return [list(row) for row in zip(*columns, strict=True)]


def _compared(measure: str, metric: Metric, systems: Named, streams: Streams) -> list[Comparison]:
    """Compares systems with the first one; a test of several metrics would keep only one of those called BLEU."""
    signatures, scores = PairedTest(systems, {measure: metric}, streams, test_type="bs")()
    ((name, how),) = signatures.items()
    results: list[Any] = scores[name]
    first, *others = results
    # sacreBLEU counts only differences larger than the real one: equal scores would differ significantly.
    p_values = [1.0 if one.score == first.score else one.p_value for one in others]
    return [Comparison(title(measure, name), p_value, str(how)) for p_value in p_values]


def title(measure: str, name: str) -> str:
    """Returns what tables call a measure: as its score is called, but BLEU of older papers by a name of its own."""
    return measure if measure.startswith("bleu_") else name


def _sacrebleu(tokenize: str, lowercase: bool) -> BLEU:
    if tokenize not in BLEU.TOKENIZERS:
        raise ValueError(f"unknown tokenize={tokenize!r}; sacreBLEU has {', '.join(map(repr, BLEU.TOKENIZERS))}")
    # force: no warning about tokenised text; "none" is for that.
    return BLEU(tokenize=tokenize, lowercase=lowercase, force=tokenize == "none")


def _compound_split(tokenize: str) -> BLEU:
    if tokenize not in COMPOUND_TOKENIZERS:
        raise ValueError(
            f"tokenize={tokenize!r} can't be combined with split compounds; give one of "
            f"{', '.join(map(repr, COMPOUND_TOKENIZERS))}"
        )
    metric, words = _multi_bleu(), BLEU(tokenize=tokenize).tokenizer
    metric.tokenizer = lambda text: split_compounds(words(text))
    metric.tokenizer_signature = f"{tokenize}+compound-split"
    return metric


def _multi_bleu(lowercase: bool = False) -> BLEU:
    return BLEU(tokenize="none", smooth_method="none", lowercase=lowercase, force=True)


def _score(metric: Metric, hypotheses: list[str], streams: Streams) -> Score:
    result = metric.corpus_score(hypotheses, streams)
    details = result.format().partition(" = ")[2].partition(" ")[2]  # behind "BLEU = 41.21"
    value = 100.0 if 100 < result.score < 100 + 1e-6 else result.score  # a perfect BLEU is 100.00000000000004
    return Score(result.name, value, str(metric.get_signature()), details)


def nonempty(references: Sequence[str]) -> list[str]:
    """Returns the references of one hypothesis but for empty ones, which sacreBLEU takes for references of length 0.

    If all are empty, the first one stays.
    """
    return list(filter(None, references)) or list(references[:1])


def _checked(hypotheses: Sequence[str], references: References) -> tuple[list[str], Streams]:
    """The hypotheses, and the references as sacreBLEU has them."""
    for name, items in (("hypotheses", hypotheses), ("references", references)):
        if isinstance(items, str):  # a sequence of strings too: its letters would be scored
            raise TypeError(f"{name} is a str; give a list of strings, [text] for a single one")
    hypotheses = list(hypotheses)
    rows = [nonempty(one) if isinstance(one, list | tuple) else [one] for one in references]
    if len(hypotheses) != len(rows) or not all(rows):
        raise ValueError(
            f"{len(hypotheses)} hypotheses but {sum(map(bool, rows))} references; give one reference per hypothesis, "
            "or a list of one or more"
        )
    if not rows:
        raise ValueError("hypotheses and references are empty; a score needs at least one sentence")
    return hypotheses, [list(column) for column in zip_longest(*rows)]
