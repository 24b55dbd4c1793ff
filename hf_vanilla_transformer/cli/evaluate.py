"""`vanilla-transformer evaluate`."""

import argparse
import itertools
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..checkpoints.files import write_text
from ..errors import first_line
from .common import (
    LANGUAGES,
    PROGRAM,
    UsageError,
    add_decoding_arguments,
    add_language_arguments,
    check_model_name,
    check_output,
    decoding_errors,
    decoding_options,
    load_ensemble,
    positive,
    read_parallel,
    say_written,
    show,
    table,
    warning_of_line,
)

if TYPE_CHECKING:
    from ..metrics import Comparison, Score
    from ..translation.backend import Backend
    from ..translation.scoring import Likelihood

PACKAGES = ("torch", "transformers", "sacrebleu")
LABELS = {"num_beams": "beam", "length_penalty": "alpha"}  # of rows that differ by the search
BLEU_KINDS = {"sacrebleu": "bleu", "multi30k": "bleu_multi30k", "compound-split": "bleu_compound_split"}
MEASURES = (*BLEU_KINDS.values(), "chrf", "exact_match", "wer", "ser", "cer")  # of metrics, which takes long to import
TOP = (1, 3, 5, 10, 20, 50)  # of n-best lists


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Measure BLEU, chrF, errors of symbols and perplexity of one or several checkpoints."""
    parser.epilog = (
        "Perplexity is the reference's, per token of the model's own vocabulary, </s> included. Speed is that of "
        "decoding alone, from text to text. Perplexity leaves out pairs with a side longer than --max-source-tokens; a "
        "warning names them. Files are written when all models are evaluated, each completely or not at all."
    )
    parser.add_argument(
        "--model",
        nargs="+",
        required=True,
        metavar="DIR",
        help="saved models' folders, or names on the Hub; one row each",
    )
    parser.add_argument(
        "--ensemble", action="store_true", help="evaluate the models as one that averages their probabilities"
    )
    parser.add_argument(
        "--source",
        required=True,
        metavar="FILE",
        help="sentences, one per line, compressed or not; or a table (.tsv, .csv, .jsonl, .parquet) with both sides",
    )
    parser.add_argument(
        "--reference",
        nargs="+",
        default=[],
        metavar="FILE",
        help="their reference translations, line by line; of several files, a line of a later one may be empty",
    )
    for name in ("source", "target"):
        help = f"the {name}'s column of the table, by its name or its number (default: {name})"
        parser.add_argument(f"--{name}-column", metavar="NAME", help=help)
    parser.add_argument("--feature-columns", nargs="+", metavar="NAME", help="columns with features of the source")
    _add_metric_arguments(parser)
    _add_file_arguments(parser)
    add_language_arguments(parser)
    add_decoding_arguments(parser)
    parser._option_string_actions["--greedy"].const = [1]
    for option in map(parser._option_string_actions.get, ("--length-penalty", "--num-beams")):
        assert option is not None
        option.nargs, option.help = "+", f"{option.help}; of several, each has a row"  # the model is loaded once
    parser.set_defaults(run=_evaluate)


def _add_metric_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--metrics",
        nargs="+",
        choices=MEASURES,
        default=[],
        metavar="NAME",
        help=f"of {', '.join(MEASURES)} (default: bleu and chrf; with a tokenizer of words or characters, exact_match "
        "and ser). wer: the rest of exact_match; ser, cer: errors per symbol, per character",
    )
    parser.add_argument(
        "--n-best",
        type=positive,
        metavar="N",
        help="measure as well how often one of the best 1, 3, 5 ... N is right (lists that lack different ones are "
        "searched with more beams)",
    )
    parser.add_argument(
        "--bleu",
        nargs="+",
        choices=BLEU_KINDS,
        default=[],
        help="sacrebleu: what to report today (default); multi30k: lower-cased, split at white space only, for "
        "tokenised text; compound-split: the paper's, with compounds split at hyphens (##AT##-##AT##)",
    )
    parser.add_argument(
        "--tokenize",
        default="13a",
        metavar="NAME",
        help="tokeniser of sacrebleu and compound-split: 13a (default), intl, none (for tokenised text), zh, char ...",
    )
    parser.add_argument("--lowercase", action="store_true", help="case-insensitive sacrebleu and chrF")
    parser.add_argument(
        "--significance",
        action="store_true",
        help="compare each row's measures with those of the first row: sacreBLEU's paired bootstrap "
        "resampling, 1,000 resamples (Koehn 2004)",
    )


def _add_file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write scores, signatures and settings there")
    parser.add_argument("--output", metavar="FILE", help="write the translations there, one per line")
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")


@dataclass
class _Result:
    """The scores and speeds of one model, or of one ensemble."""

    models: list[str]
    scores: "dict[str, Score]"  # by measures
    num_sentences: int
    likelihood: "Likelihood"
    translations: list[str]
    num_output_tokens: int
    seconds: dict[str, float]  # of loading, decoding, scoring
    decoding: dict[str, Any]
    name: str  # of the row
    comparisons: "list[Comparison]" = field(default_factory=list)  # with the first row

    def per_second(self, count: int) -> float:
        return count / self.seconds["decoding"]


def _evaluate(arguments: argparse.Namespace) -> None:
    """Checks files and metrics, evaluates each model or the ensemble, prints the report and writes the files."""
    for name in arguments.model:
        check_model_name(name)
    _check_models(arguments)
    sources, references = _read(arguments)
    _check_outputs(arguments)
    measuring = _Measuring(arguments, sources, references)
    try:
        measuring.check()
    except (ValueError, ImportError, RuntimeError) as error:
        raise UsageError(first_line(error)) from error

    groups = [arguments.model] if arguments.ensemble else [[name] for name in arguments.model]
    results = [row for group in groups for row in _results(arguments, group, sources, references, measuring)]
    if arguments.significance:
        measuring.compare(results)
    try:
        show(_report(results))
    finally:  # even if the report can't be printed
        _write(arguments, results)
    say_written(arguments.output, arguments.json)


def _check_models(arguments: argparse.Namespace) -> None:
    if arguments.ensemble and len(arguments.model) < 2:
        raise UsageError("--ensemble needs two models or more; give --model A B")
    rows = (1 if arguments.ensemble else len(arguments.model)) * len(_searches(arguments))
    if rows > 1 and arguments.output:
        raise UsageError(
            "--output is for one model's translations; give a single --model, or --ensemble, and at most one "
            "--length-penalty and --num-beams"
        )
    if arguments.n_best and arguments.ensemble:
        raise UsageError("--n-best is for one model; leave --ensemble out")
    if arguments.significance and rows == 1:
        raise UsageError(
            "--significance compares rows; give --model A B or two values of --length-penalty or --num-beams"
        )


def _read(arguments: argparse.Namespace) -> tuple[list[str], list[list[str]]]:
    """Returns the sources, and the references of each: one, or several by files."""
    from ..data.formats import check_file, is_table
    from ..data.tables import read_table

    if not arguments.reference:
        if not is_table(arguments.source):
            raise UsageError("the sources need references; give --reference FILE, or a table with both by --source")
        check_file(Path(arguments.source))
        sides = (arguments.source_column or "source", arguments.target_column or "target")
        columns = (*sides, *(arguments.feature_columns or ()))
        pairs = list(read_table(arguments.source, columns))
        return [pair["source"] for pair in pairs], [[pair["target"]] for pair in pairs]
    if is_table(arguments.source) or arguments.source_column or arguments.target_column or arguments.feature_columns:
        raise UsageError("--reference and columns are two ways to give references; give text files, or one table")
    read = [read_parallel(arguments.source, name) for name in arguments.reference]
    rows = zip(*(references for _, references in read), strict=True)
    return read[0][0], [[first, *filter(None, others)] for first, *others in rows]


def _searches(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the options by which the rows of one model differ."""
    values = ([None] if (given := getattr(arguments, option)) is None else given for option in LABELS)
    return [dict(zip(LABELS, one, strict=True)) for one in itertools.product(*values)]


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Checks, before any work is done, that the output files can be written."""
    taken = [arguments.source, *arguments.reference]
    for option, name in (("--json", arguments.json), ("--output", arguments.output)):
        if name is not None:
            check_output(option, name, arguments.overwrite, taken)
            taken.append(name)


def _results(
    arguments: argparse.Namespace,
    names: list[str],
    sources: list[str],
    references: list[list[str]],
    measuring: "_Measuring",
) -> list[_Result]:
    """Loads a model or an ensemble, computes its perplexity, translates by each search, and scores."""
    from ..translation.decoding import decode, source_limit
    from ..translation.scoring import score_targets

    begun = time.perf_counter()
    tokenizer, model = load_ensemble(names, arguments)
    seconds = {"loading": time.perf_counter() - begun}
    with decoding_errors():
        measuring.fit(tokenizer)
    searches = _searches(arguments)
    options = [decoding_options(argparse.Namespace(**vars(arguments) | one), model) for one in searches]
    limit = source_limit(model, arguments.max_source_tokens, tokenizer)
    languages = {name: getattr(arguments, name) for name in LANGUAGES}
    limits = {"batch_size": arguments.batch_size, "batch_tokens": arguments.batch_tokens}
    results = []
    with decoding_errors():
        settings = [{**_settings(model, one), **limits, "max_source_tokens": limit} for one in options]
        with _timed("scoring", len(sources), seconds) as progress:
            likelihood = score_targets(
                model,
                tokenizer,
                sources,
                [own[0] for own in references],
                **languages,
                batch_size=arguments.batch_size,
                max_tokens=arguments.max_source_tokens,
                progress=progress.update,
                on_omission=lambda index: _warn(index, limit, "it is left out of the perplexity"),
            )
        for search, one, setting in zip(searches, options, settings, strict=True):
            with _timed("decoding", len(sources), seconds) as progress:
                hypotheses = decode(
                    model,
                    tokenizer,
                    sources,
                    **languages,
                    **limits,
                    max_source_tokens=arguments.max_source_tokens,
                    n_best=arguments.n_best,
                    unknown=arguments.unknown,
                    progress=progress.update,
                    on_division=lambda index, count: _warn(index, limit, f"it is translated in {count} pieces"),
                    **one,
                )
            texts = [[one.text for one in row] for row in hypotheses]
            translations = [row[0] for row in texts]
            scores = measuring.measure(texts)
            several = (option for option in LABELS if len(getattr(arguments, option) or ()) > 1)
            name = ", ".join([" + ".join(names), *(f"{LABELS[option]} {search[option]:g}" for option in several)])
            tokens = sum(row[0].num_tokens for row in hypotheses)
            results.append(
                _Result(
                    names, scores, len(measuring.places), likelihood, translations, tokens, dict(seconds), setting, name
                )
            )
    return results


@contextmanager
def _timed(what: str, total: int, seconds: dict[str, float]) -> Iterator[Any]:
    """Yields a progress bar, shown if standard error is a terminal, and notes how long the work took."""
    from tqdm import tqdm

    begun = time.perf_counter()
    with tqdm(desc=what, total=total, unit=" sentences", disable=None, leave=False) as progress:
        yield progress
    seconds[what] = time.perf_counter() - begun


def _warn(index: int, limit: int, consequence: str) -> None:
    from tqdm import tqdm

    tqdm.write(warning_of_line(f"line {index + 1}", limit, consequence), file=sys.stderr)


class _Measuring:
    """How hypotheses are measured; of symbols, the references of lines with the same source are references of one."""

    def __init__(self, arguments: argparse.Namespace, sources: list[str], references: list[list[str]]) -> None:
        self._sources, self._references = sources, references
        self._most = arguments.n_best or 0  # of the hypotheses in a list
        self._is_resampled = arguments.significance
        self.places: Sequence[int] = range(len(sources))  # of the lines that are measured
        self._kinds = [BLEU_KINDS[kind] for kind in arguments.bleu]
        self.names = list(dict.fromkeys([*self._kinds, *arguments.metrics]))
        self._is_chosen = bool(arguments.metrics)
        self.how: dict[str, Any] = {"tokenize": arguments.tokenize, "lowercase": arguments.lowercase}

    def check(self) -> None:
        """Raises an error for a measure that isn't available."""
        from ..metrics import measure

        measure(self.names or ["bleu"], self._sources, self._sources, **self.how)
        self._check_resampling()

    def _check_resampling(self) -> None:
        from ..metrics import check_resampling

        if self._is_resampled:
            check_resampling(len(self._references))

    def fit(self, tokenizer: Any) -> None:
        """Chooses what is still open by the first model's tokenizer, and warns of BLEU that can only be 0."""
        from ..data.symbols import default_measures, splits_into_symbols, symbol_splitter
        from ..metrics import by_source, measure, why_unmeasurable

        if "symbols" in self.how:
            return
        if not self._is_chosen:
            others = [name for name in default_measures(tokenizer) if not (self._kinds and name == "bleu")]
            self.names = [*self.names, *others]
        self.how["symbols"] = None
        if splits_into_symbols(tokenizer):
            self.how["symbols"] = symbol_splitter(tokenizer)
            self.places, self._references = by_source(self._sources, self._references)
            self._check_resampling()
        bleu = [name for name in self.names if name in BLEU_KINDS.values()]
        alone = measure(bleu, [own[0] for own in self._references], self._references, **self.how)
        if problem := next(filter(None, map(why_unmeasurable, alone.values())), None):
            print(f"{PROGRAM}: warning: {problem}", file=sys.stderr)

    def measure(self, texts: list[list[str]]) -> "dict[str, Score]":
        """Returns the scores of n-best lists of all lines."""
        from ..metrics import measure, top_accuracy

        rows = [texts[place] for place in self.places]
        scores = measure(self.names, [row[0] for row in rows], self._references, **self.how)
        for count in sorted({*(one for one in TOP if one < self._most), self._most} - {0}):
            scores[f"top_{count}"] = top_accuracy(rows, self._references, count, symbols=self.how["symbols"])
        return scores

    def compare(self, results: list[_Result]) -> None:
        """Tests whether each result but the first differs from the first by more than chance."""
        from ..metrics import paired_bootstrap

        systems = [[result.translations[place] for place in self.places] for result in results]
        comparisons = paired_bootstrap(systems, self._references, names=self.names, **self.how)
        for result, own in zip(results[1:], comparisons, strict=True):
            result.comparisons = own


def _settings(backend: "Backend", options: dict[str, Any]) -> dict[str, Any]:
    """Returns how a row decodes, and by what."""
    attached = getattr(vars(getattr(backend, "model", backend)).get("engine"), "compute_type", None)
    return {
        **backend.plan(options).settings(),
        "backend": backend.name,
        "compute_type": str(backend.dtype) if backend.name == "ctranslate2" else attached,
        "device": str(backend.device),
        "dtype": str(backend.dtype),
    }


# ---- Output ----
def _report(results: Sequence[_Result]) -> str:
    """Formats the results: a table, the signatures, and BLEU's details."""
    titles = {name: _title(name, score) for name, score in results[0].scores.items()}
    rows = [["model", *titles.values(), "perplexity", "sentences/s", "tokens/s", "loading"]]
    for result in results:
        figures = [*(score.value for score in result.scores.values()), result.likelihood.perplexity]
        speeds = [result.per_second(len(result.translations)), result.per_second(result.num_output_tokens)]
        shown = [*(f"{figure:.2f}" for figure in figures), *(f"{speed:.1f}" for speed in speeds)]
        rows.append([result.name, *shown, f"{result.seconds['loading']:.1f} s"])
    signatures = [f"{titles[name]}: {score.signature}" for name, score in results[0].scores.items()]
    signatures += [
        f"perplexity of {name[0]}: without {result.likelihood.num_left_out} pairs that are too long"
        for result, name in zip(results, rows[1:], strict=True)
        if result.likelihood.num_left_out
    ]
    details = [
        f"{titles[name]}{f' of {row[0]}' if len(results) > 1 else ''}: {score.details}"
        for result, row in zip(results, rows[1:], strict=True)
        for name, score in result.scores.items()
        if score.details
    ]
    details += [
        f"{one.name} of {result.name}: p = {one.p_value:.3f} against {results[0].name} ({one.signature})"
        for result in results
        for one in result.comparisons
    ]
    return "\n".join([f"{results[0].num_sentences} sentences", table(rows, align=">"), *signatures, *details])


def _title(name: str, score: "Score") -> str:
    """A column's title: the score's name, with the kind of an older BLEU."""
    kind = next((kind for kind, measure in BLEU_KINDS.items() if measure == name != "bleu"), "")
    return f"{score.name} {kind}".rstrip()


def _write(arguments: argparse.Namespace, results: list[_Result]) -> None:
    if arguments.output:
        write_text(arguments.output, "".join(f"{line}\n" for line in results[0].translations))
    if arguments.json:
        record = _record(arguments, results)
        write_text(arguments.json, json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _record(arguments: argparse.Namespace, results: list[_Result]) -> dict[str, Any]:
    from importlib.metadata import version  # it takes ten milliseconds, of every command

    versions = {"python": platform.python_version(), "hf_vanilla_transformer": __version__}
    return {
        "source": arguments.source,
        "reference": arguments.reference[0] if len(arguments.reference) == 1 else arguments.reference,
        "num_sentences": results[0].num_sentences,
        "ensemble": arguments.ensemble,
        "results": [_result_record(result) for result in results],
        "versions": versions | {name: version(name) for name in PACKAGES},
    }


def _result_record(result: _Result) -> dict[str, Any]:
    """One result as an object for the JSON file."""
    likelihood, scores = result.likelihood, {name: asdict(score) for name, score in result.scores.items()}
    return {
        "models": result.models,
        "p_values": {one.name: one.p_value for one in result.comparisons},
        "bleu": {kind: scores[name] for kind, name in BLEU_KINDS.items() if name in scores},
        **{name: score for name, score in scores.items() if name not in BLEU_KINDS.values()},
        "perplexity": _finite(likelihood.perplexity),
        "negative_log_probability": _finite(likelihood.negative_log_probability),
        "num_reference_tokens": likelihood.num_tokens,
        "num_pairs_without_perplexity": likelihood.num_left_out,
        "num_output_tokens": result.num_output_tokens,
        "sentences_per_second": result.per_second(len(result.translations)),
        "tokens_per_second": result.per_second(result.num_output_tokens),
        "seconds": result.seconds,
        "decoding": result.decoding,
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None  # JSON has no infinity
