"""Evaluation: a corpus is translated, its translations are scored, and its references' perplexity is computed."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..data.symbols import default_measures, symbol_splitter
from ..metrics import References, Score, Splitter, by_source, measure, top_accuracy, why_unmeasurable
from ..plan_vanilla_transformer import Plan
from .backend import Backend
from .decoding import texts_of, translate
from .scoring import Likelihood, score_targets
from .spelling import unknown_of_target
from .translator import Translator

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TOP = (1, 3, 5, 10, 20, 50)  # of n-best lists


@dataclass(frozen=True)
class Measures:
    """What translations are measured by, of `metrics.MEASURES`, and how: as for `metrics.measure`."""

    names: tuple[str, ...]
    tokenize: str = "13a"
    lowercase: bool = False
    symbols: Splitter | None = None  # with it, lines with the same source are one, with several references
    unknown: str | None = None

    @classmethod
    def of(
        cls,
        tokenizer: "PreTrainedTokenizerBase",
        names: Iterable[str] = (),
        tokenize: str = "13a",
        lowercase: bool = False,
    ) -> "Measures":
        """Returns the measures for a model's tokenizer; without names, its defaults."""
        measures = tuple(names) or tuple(default_measures(tokenizer))
        unknown = unknown_of_target(tokenizer)
        shown = None if unknown is None else str(tokenizer.convert_ids_to_tokens(unknown))
        return cls(measures, tokenize, lowercase, symbol_splitter(tokenizer), shown)

    @property
    def how(self) -> dict[str, Any]:
        """The keyword arguments of `metrics.measure` and `metrics.paired_bootstrap`."""
        return {name: getattr(self, name) for name in ("tokenize", "lowercase", "symbols", "unknown")}

    def lines(self, sources: Sequence[str], references: References) -> tuple[Sequence[int], References]:
        """Returns the places of the lines that are measured, and the references of each."""
        return (range(len(sources)), references) if self.symbols is None else by_source(sources, references)


@dataclass(frozen=True)
class EvaluationResult:
    """How a model translates a corpus."""

    scores: dict[str, Score]  # by the names of the measures; with `n_best`, "top_1", "top_3" and so on as well
    translations: list[str]  # one for each source
    num_sentences: int  # that were measured: of words or characters, equal sources are one
    num_output_tokens: int  # that the model wrote, with the ends of sentences
    likelihood: Likelihood | None  # of the references, with their perplexity; None: it wasn't asked for
    seconds: dict[str, float]  # of "decoding", and of "scoring", the likelihood
    measures: Measures
    plan: Plan  # how the model decoded; `str` says it in words


def evaluate(
    model: "Translator | PreTrainedModel | Backend | str | Path",
    sources: Iterable[str],
    references: References,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    metrics: Iterable[str] | Measures = (),
    tokenize: str = "13a",
    lowercase: bool = False,
    perplexity: bool = True,
    n_best: int | None = None,
    progress_bar: bool | None = None,
    on_omission: Callable[[int], object] | None = None,
    **options: object,
) -> EvaluationResult:
    """Translates sentences, scores the translations, and computes the perplexity of the references.

    Args:
        model: A `Translator`, or what a `Translator` opens.
        sources: N sentences.
        references: A string for each, or a list of one or more. The first counts for the perplexity.
        tokenizer: Of a model that isn't a `Translator`, a folder or a name.
        metrics: Of `metrics.MEASURES`; none: BLEU and chrF, or, with a tokenizer of words or characters, exact match
            and errors per symbol.
        tokenize: sacreBLEU's way to split words, for BLEU.
        lowercase: Whether BLEU and chrF are case-insensitive.
        perplexity: Whether the references' perplexity is computed. Pairs with a side that is too long are left out.
        n_best: Also measures how often one of the best 1, 3, 5 ... `n_best` translations is right.
        progress_bar: None: if standard error is a terminal.
        on_omission: Called with the index of each pair that is left out; None: a warning is logged.
        **options: As for a call of `Translator`: `num_beams`, `batch_size`, `max_source_tokens`, `tgt_lang` ...

    Raises:
        ValueError: There are no sentences, numbers of sources and references differ, a measure or tokeniser is unknown,
            or as for `Translator` and its calls.
    """
    texts = texts_of("sources", sources)
    if len(texts) != len(references):
        raise ValueError(f"{len(texts)} sources and {len(references)} references; give one or more for each")
    translator = model if isinstance(model, Translator) else Translator(model, tokenizer=tokenizer)
    tokenizer = translator.tokenizer
    measures = metrics if isinstance(metrics, Measures) else Measures.of(tokenizer, metrics, tokenize, lowercase)
    measure(measures.names, ["a"], ["a"], **measures.how)  # an unknown one is an error now
    places, kept = measures.lines(texts, references)
    if measures is not metrics:  # otherwise they measured others before
        _warn_of_bleu(measures, kept)
    call = translator.call({**options, "n_best": n_best})
    seconds: dict[str, float] = {}
    likelihood = None
    if perplexity:
        with _timed("scoring", len(texts), progress_bar, seconds) as progress:
            likelihood = score_targets(
                translator.decodes_with,
                tokenizer,
                texts,
                [one if isinstance(one, str) else one[0] for one in references],
                **call.languages.asked,
                batch_size=call.batch_size,
                max_tokens=call.max_source_tokens,
                progress=progress.update,
                on_omission=on_omission,
            )
    with _timed("decoding", len(texts), progress_bar, seconds) as progress:
        both = replace(call, progress=lambda number: (progress.update(number), call.progress(number)))
        rows = translate(both, texts)
    lists, best = [[one.text for one in row] for row in rows], [row[0] for row in rows]
    scores = _scores(measures, [lists[place] for place in places], kept, n_best or 0)
    texts, written = [one.text for one in best], sum(one.num_tokens for one in best)
    return EvaluationResult(scores, texts, len(places), written, likelihood, seconds, measures, call.plan)


def _warn_of_bleu(measures: Measures, references: References) -> None:
    """Logs that BLEU can only be 0, if it can't be more for the references themselves."""
    best = [one if isinstance(one, str) else one[0] for one in references]
    scores = measure([name for name in measures.names if name.startswith("bleu")], best, references, **measures.how)
    if problem := next(filter(None, map(why_unmeasurable, scores.values())), None):
        logger.warning(problem)


@contextmanager
def _timed(what: str, total: int, shown: bool | None, seconds: dict[str, float]) -> Iterator[tqdm]:
    """Yields a progress bar, and notes how long the work took."""
    hidden = None if shown is None else not shown
    begun = time.perf_counter()
    with tqdm(desc=what, total=total, unit=" sentences", disable=hidden, leave=False) as progress:
        yield progress
    seconds[what] = time.perf_counter() - begun


def _scores(measures: Measures, lists: list[list[str]], references: References, most: int) -> dict[str, Score]:
    """Measures n-best lists: the best of each by all measures, and how often one of the first few is right."""
    scores = measure(measures.names, [own[0] for own in lists], references, **measures.how)
    for count in sorted({*(one for one in TOP if one < most), most} - {0}):
        scores[f"top_{count}"] = top_accuracy(lists, references, count, symbols=measures.symbols)
    return scores
